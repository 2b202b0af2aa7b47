"""What CMake says to a machine that cannot build the extension."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PATH = os.pathsep.join((str(pathlib.Path(sys.executable).parent), os.environ["PATH"]))
CMAKE, NINJA = shutil.which("cmake", path=PATH), shutil.which("ninja", path=PATH)


def has_tools() -> bool:
    if not CMAKE or not NINJA:
        return False
    shown = subprocess.run([CMAKE, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"version (\d+)\.(\d+)", shown)
    return bool(version) and (int(version[1]), int(version[2])) >= (3, 26)


@pytest.mark.skipif(not has_tools(), reason="needs cmake 3.26 and ninja")
@pytest.mark.parametrize("compiler", ["g++-none", None])
def test_a_missing_compiler_is_named_and_help_is_given(
    compiler: str | None, tmp_path: pathlib.Path
) -> None:
    assert CMAKE and NINJA
    env = {name: value for name, value in os.environ.items() if name != "CXX"}
    env |= {"CXX": compiler} if compiler else {"PATH": str(tmp_path)}
    tools = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={NINJA}"]
    command = [CMAKE, "-S", str(ROOT), "-B", str(tmp_path / "build"), *tools]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert result.returncode != 0
    message = " ".join(result.stderr.split())
    found = f"that CXX names, {compiler}, is missing" if compiler else "none was found"
    assert "jax_mla needs a C++20 compiler, but " in message and found in message
    assert "apt install g++" in message and "set the environment variable CXX" in message

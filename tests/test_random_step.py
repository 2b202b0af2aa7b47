"""Runs tests/cuda/random_step.cc: the steps that stress the GPU are right and of all kinds."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMPILER = os.environ.get("CXX", "c++")
NUM_STEPS = 3000


@pytest.mark.skipif(not shutil.which(COMPILER), reason="needs a C++ compiler")
def test_steps_are_right_and_of_all_kinds(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "random_step"
    source = ROOT / "tests/cuda/random_step.cc"
    command = [COMPILER, "-std=c++20", "-O1", f"-I{ROOT / 'csrc'}", "-o", str(path), str(source)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(path), str(NUM_STEPS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

"""Runs tests/cuda/plan_units.cu: the plan of ragged calls visits every row and block once."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NUM_STEPS = 1000


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_every_row_and_block_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan_units"
    command = ["nvcc", "-O3", "-std=c++20", "--expt-relaxed-constexpr", "-arch=native"]
    command += ["-DJAX_MLA_WITH_CUDA", f"-I{ROOT / 'csrc'}", "-o", str(path)]
    command += [str(ROOT / "tests/cuda/plan_units.cu")]
    command += [str(ROOT / "csrc/decode/ragged/plan.cu"), str(ROOT / "csrc/gpu/launch.cc")]
    command += map(str, (ROOT / "csrc/decode/schedule").glob("*.cc"))
    subprocess.run(command, check=True)
    done = subprocess.run([str(path), str(NUM_STEPS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

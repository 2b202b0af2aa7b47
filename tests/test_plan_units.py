"""Runs tests/cuda/plan_units.cu on the host: the plan of ragged calls, with threads for a CTA."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOST = ROOT / "tests/cuda/host"
NUM_STEPS = 60
TIMEOUT_S = 240  # a thread that misses a barrier hangs


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.full
def test_every_row_and_block_once(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plan_units"
    # As C++, which nvcc leaves to the host's compiler.
    command = ["nvcc", "-x", "c++", "-O2", "-std=c++20", "-Xcompiler=-pthread,-w"]
    command += ["-include", str(HOST / "cta.h"), f"-I{HOST}", f"-I{ROOT / 'csrc'}"]
    command += [f"-I{ROOT / 'tests/cuda'}", "-DJAX_MLA_WITH_CUDA", "-o", str(path)]
    command += [str(ROOT / "tests/cuda/plan_units.cu"), str(HOST / "plan_units.cc")]
    command += [str(ROOT / f"csrc/decode/schedule/{name}.cc") for name in ("plan", "unit_plan")]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [str(path), str(NUM_STEPS)], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr

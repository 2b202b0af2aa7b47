"""Runs tests/cuda/find_work.cu: what workers find on the device is what their host twin finds."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NUM_CASES = 5000


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_device_finds_what_the_host_finds(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "find_work"
    command = ["nvcc", "-O3", "-std=c++20", "--expt-relaxed-constexpr", "-arch=native"]
    command += ["-DJAX_MLA_WITH_CUDA", f"-I{ROOT / 'csrc'}", "-o", str(path)]
    command += [str(ROOT / "tests/cuda/find_work.cu")]
    command += map(str, (ROOT / "csrc/decode/schedule").glob("*.cc"))
    subprocess.run(command, check=True)
    done = subprocess.run([str(path), str(NUM_CASES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

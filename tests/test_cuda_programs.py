"""The programs that only a GPU can run compile here, too: a change of csrc must not break them."""

import pathlib
import shutil
import subprocess

import pytest
from cutlass_headers import INCLUDE, needs_cutlass

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Not sm100_arguments.cu: test_sm100.py runs it on any machine.
PROGRAMS = [
    *(ROOT / "tests").glob("*.cu"),
    *(p for p in (ROOT / "tests/cuda").glob("*.cu") if p.stem != "sm100_arguments"),
    *(ROOT / "tools").glob("*.cu"),
]


@needs_cutlass
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_compiles(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    command = ["nvcc", "-ptx", "-std=c++20", "--expt-relaxed-constexpr", "-arch=sm_90a"]
    command += ["-DJAX_MLA_WITH_CUDA", "-DJAX_MLA_WITH_SM90A", f"-I{ROOT / 'csrc'}"]
    command += [f"-I{INCLUDE}", "-o", str(tmp_path / "out.ptx"), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

"""compute-sanitizer on small cases, through a program of its own: JAX under it takes minutes."""

import pathlib
import shutil
import subprocess
from collections.abc import Callable

import pytest

from jax_mla.testing.run import num_gpus

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = (
    "tests/cuda_driver.cu",
    "csrc/decode/split/combine.cu",
    "csrc/decode/split/plan.cc",
    "csrc/decode/sm80/backend.cc",
    "csrc/append/append.cu",
    "csrc/gpu/launch.cc",
)
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not num_gpus(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc"),
    pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer"),
]


@pytest.fixture(scope="module")
def driver(
    tmp_path_factory: pytest.TempPathFactory,
    kernel_instances: Callable[[str], list[pathlib.Path]],
) -> pathlib.Path:
    """The program, built for this machine's GPU."""
    path = tmp_path_factory.mktemp("driver") / "cuda_driver"
    command = ["nvcc", "-O3", "-std=c++20", "-arch=native", "-lineinfo", "-DJAX_MLA_WITH_CUDA"]
    command += ["--expt-relaxed-constexpr", "-I", str(ROOT / "csrc"), "-o", str(path)]
    command += [str(ROOT / source) for source in SOURCES] + [
        str(path) for path in kernel_instances("csrc/decode/sm80")
    ]
    subprocess.run(command, check=True)
    return path


def test_driver_is_right(driver: pathlib.Path) -> None:
    subprocess.run([str(driver)], check=True)


@pytest.mark.sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_is_clean(driver: pathlib.Path, tool: str) -> None:
    command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9", str(driver)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

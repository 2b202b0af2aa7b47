"""compute-sanitizer on small cases, through programs of its own: JAX under it takes minutes."""

import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterable

import pytest

from jax_mla.testing.run import num_gpus

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What the programs are built from, besides the kernel instances of sm80.
SHARED = (
    "csrc/append/append.cu",
    "csrc/append/encode.cu",
    "csrc/decode/sm80/backend.cc",
    "csrc/decode/merge/combine.cu",
    "csrc/decode/schedule/plan.cc",
    "csrc/gpu/launch.cc",
)
DRIVER = (
    "tests/cuda_driver.cu",
    "csrc/append/cpu/store_row.cc",
    "csrc/append/cpu/transform_row.cc",
    *SHARED,
)
RAGGED_STRESS = (
    "tests/cuda/ragged_stress.cu",
    "csrc/decode/ragged/launch.cc",
    "csrc/decode/ragged/plan.cu",
    "csrc/decode/ragged/rows.cu",
    "csrc/decode/schedule/unit_plan.cc",
    *SHARED,
)
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# Not initcheck: the stress fills the scratch before every step.
STRESS_TOOLS = ("memcheck", "racecheck", "synccheck")
STRESS_STEPS = 12
STRESS_TOKENS = 60  # longest sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not num_gpus(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc"),
    pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer"),
]


KernelInstances = Callable[[str], list[pathlib.Path]]


def build(path: pathlib.Path, sources: Iterable[str], instances: KernelInstances) -> pathlib.Path:
    """Build a program for this machine's GPU."""
    command = ["nvcc", "-O3", "-std=c++20", "-arch=native", "-lineinfo", "-DJAX_MLA_WITH_CUDA"]
    command += ["--expt-relaxed-constexpr", "-I", str(ROOT / "csrc"), "-o", str(path)]
    command += [str(ROOT / source) for source in sources]
    command += [str(instance) for instance in instances("csrc/decode/sm80")]
    subprocess.run(command, check=True)
    return path


@pytest.fixture(scope="module")
def driver(
    tmp_path_factory: pytest.TempPathFactory, kernel_instances: KernelInstances
) -> pathlib.Path:
    return build(tmp_path_factory.mktemp("driver") / "cuda_driver", DRIVER, kernel_instances)


@pytest.fixture(scope="module")
def ragged_stress(
    tmp_path_factory: pytest.TempPathFactory, kernel_instances: KernelInstances
) -> pathlib.Path:
    path = tmp_path_factory.mktemp("stress") / "ragged_stress"
    return build(path, RAGGED_STRESS, kernel_instances)


def sanitize(tool: str, *command: object) -> None:
    sanitizer = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9"]
    sanitizer += [str(part) for part in command]
    done = subprocess.run(sanitizer, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_driver_is_right(driver: pathlib.Path) -> None:
    subprocess.run([str(driver)], check=True)


@pytest.mark.sanitizer
@pytest.mark.parametrize("tool", TOOLS)
def test_sanitizer_is_clean(driver: pathlib.Path, tool: str) -> None:
    sanitize(tool, driver)


@pytest.mark.sanitizer
@pytest.mark.parametrize("tool", STRESS_TOOLS)
def test_sanitizer_is_clean_for_steps(ragged_stress: pathlib.Path, tool: str) -> None:
    sanitize(tool, ragged_stress, STRESS_STEPS, 1, "sm80", STRESS_TOKENS)

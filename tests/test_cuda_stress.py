"""A short run of tests/cuda/decode_stress.cu: random small calls of the Hopper kernels."""

import pathlib
import shutil
import subprocess
import sysconfig
from collections.abc import Callable

import jax
import pytest

from jax_mla.testing.run import GPU_PLATFORM, num_gpus

ROOT = pathlib.Path(__file__).resolve().parent.parent
CUTLASS = pathlib.Path(sysconfig.get_paths()["purelib"]) / "cutlass_library/source/include"
VARIANTS = ("narrow", "narrow8", "narrow16", "wide")
KernelInstances = Callable[[str], list[pathlib.Path]]
SANITIZED_CASES = 6
SANITIZED_TOKENS = 100  # longest sequence under compute-sanitizer, which is slow


def has_hopper() -> bool:
    return bool(num_gpus()) and jax.devices(GPU_PLATFORM)[0].compute_capability == "9.0"


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_hopper(), reason="needs a Hopper GPU"),
    pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc"),
    pytest.mark.skipif(not CUTLASS.exists(), reason="needs nvidia-cutlass"),
]


def build(directory: pathlib.Path, kernel_instances: KernelInstances, *flags: str) -> pathlib.Path:
    path = directory / "decode_stress"
    sources = kernel_instances("csrc/decode/sm90")
    sources += sorted((ROOT / "csrc/decode/sm90").rglob("*.cc"))
    sources += [ROOT / "csrc/decode/split/combine.cu", ROOT / "csrc/decode/split/plan.cc"]
    command = ["nvcc", "-O3", "-std=c++20", "-lineinfo", "--expt-relaxed-constexpr", "-t", "0"]
    command += ["-gencode=arch=compute_90a,code=sm_90a", "-DJAX_MLA_WITH_CUDA", *flags]
    command += ["-DJAX_MLA_WITH_SM90A", f"-I{ROOT / 'csrc'}", f"-I{CUTLASS}", "-o", str(path)]
    command += [str(ROOT / "tests/cuda/decode_stress.cu"), *map(str, sources)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture(scope="module")
def stress(
    tmp_path_factory: pytest.TempPathFactory, kernel_instances: KernelInstances
) -> pathlib.Path:
    return build(tmp_path_factory.mktemp("stress"), kernel_instances)


@pytest.fixture(scope="module")
def chaos(
    tmp_path_factory: pytest.TempPathFactory, kernel_instances: KernelInstances
) -> pathlib.Path:
    """With random delays at every barrier and copy."""
    return build(tmp_path_factory.mktemp("chaos"), kernel_instances, "-DMLA_CHAOS")


def check(*command: object) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_calls(stress: pathlib.Path, variant: str) -> None:
    check(stress, 500, 1, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_delays(chaos: pathlib.Path, variant: str) -> None:
    check(chaos, 200, 1, variant)


# Not synccheck and wide: its roles meet at barriers that each of them reaches at a place of its own
# in the code, which the hardware and PTX allow and the tool does not (docs/kernels/decode_sm90.md).
@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("tool", "variant"),
    [("memcheck", v) for v in VARIANTS] + [("synccheck", v) for v in VARIANTS if v != "wide"],
)
def test_sanitizer_is_clean(stress: pathlib.Path, tool: str, variant: str) -> None:
    sanitizer = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9"]
    check(*sanitizer, stress, SANITIZED_CASES, 1, variant, SANITIZED_TOKENS)

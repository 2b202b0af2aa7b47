"""Short runs of tests/cuda/{decode,ragged,prefill,index_topk}_stress.cu: random calls on Hopper."""

import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import jax
import pytest
from cutlass_headers import INCLUDE, needs_cutlass

from jax_mla.testing.run import GPU_PLATFORM, num_gpus

ROOT = pathlib.Path(__file__).resolve().parent.parent
VARIANTS = ("narrow", "narrow8", "narrow16", "narrow16x2", "scores", "wide")
STEP_KERNELS = ("sm90", "sm90:narrow", "sm90:wide", "sm80", "sm80:99kb")
KernelInstances = Callable[[str], list[pathlib.Path]]
SANITIZED_CASES = 6
SANITIZED_TOKENS = 100  # longest sequence under compute-sanitizer, which is slow


def has_hopper() -> bool:
    return bool(num_gpus()) and jax.devices(GPU_PLATFORM)[0].compute_capability == "9.0"


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_hopper(), reason="needs a Hopper GPU"),
    pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc"),
    needs_cutlass,
]


class Programs(NamedTuple):
    """The stresses, built from the same kernels."""

    decode: pathlib.Path
    ragged: pathlib.Path
    prefill: pathlib.Path
    index_topk: pathlib.Path


def build(directory: pathlib.Path, kernel_instances: KernelInstances, *flags: str) -> Programs:
    compiler = ["nvcc", "-O3", "-std=c++20", "-lineinfo", "--expt-relaxed-constexpr", "-t", "0"]
    compiler += ["-gencode=arch=compute_90a,code=sm_90a", "-DJAX_MLA_WITH_CUDA", *flags]
    compiler += ["-DJAX_MLA_WITH_SM90A", f"-I{ROOT / 'csrc'}", f"-I{INCLUDE}"]
    sources = []
    for folder in ("csrc/decode/sm90", "csrc/decode/sm80"):
        sources += [*kernel_instances(folder), *sorted((ROOT / folder).rglob("*.cc"))]
    sources += sorted((ROOT / "csrc/decode/schedule").glob("*.cc"))
    sources += [ROOT / "csrc/decode/merge/combine.cu", ROOT / "csrc/decode/sm90/combine.cu"]
    sources += sorted((ROOT / "csrc/append").glob("*.cu"))
    ragged = ROOT / "csrc/decode/ragged"
    sources += [ragged / "launch.cc", ragged / "plan.cu", ragged / "rows.cu"]
    sources += [ROOT / "csrc/prefill/sm90/launch.cu"]
    index = ROOT / "csrc/index"
    sources += [index / "choose_backend.cc", *sorted(index.glob("*.cu"))]
    sources += [index / "sm80/scores.cu", index / "sm90/launch.cu"]
    sources += sorted((ROOT / "csrc/gpu").glob("*.cc"))
    kernels = directory / "libkernels.a"
    subprocess.run([*compiler, "-lib", "-o", str(kernels), *map(str, sources)], check=True)
    programs = Programs(*(directory / f"{name}_stress" for name in Programs._fields))
    for program in programs:
        source = ROOT / f"tests/cuda/{program.name}.cu"
        subprocess.run([*compiler, "-o", str(program), str(source), str(kernels)], check=True)
    return programs


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory, kernel_instances: KernelInstances) -> Programs:
    return build(tmp_path_factory.mktemp("stress"), kernel_instances)


@pytest.fixture(scope="module")
def chaos(tmp_path_factory: pytest.TempPathFactory, kernel_instances: KernelInstances) -> Programs:
    """With random delays at every barrier and copy of sm90."""
    return build(tmp_path_factory.mktemp("chaos"), kernel_instances, "-DMLA_CHAOS")


def check(*command: object) -> None:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_calls(stress: Programs, variant: str) -> None:
    check(stress.decode, 500, 1, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_delays(chaos: Programs, variant: str) -> None:
    check(chaos.decode, 200, 1, variant)


@pytest.mark.parametrize("kernels", STEP_KERNELS)
def test_random_steps(stress: Programs, kernels: str) -> None:
    check(stress.ragged, 300, 1, kernels)


@pytest.mark.parametrize("kernels", [k for k in STEP_KERNELS if k.startswith("sm90")])
def test_random_delays_of_steps(chaos: Programs, kernels: str) -> None:
    check(chaos.ragged, 100, 1, kernels)


def test_random_prefill(stress: Programs) -> None:
    check(stress.prefill, 300, 1)


def test_random_delays_of_prefill(chaos: Programs) -> None:
    check(chaos.prefill, 100, 1)


@pytest.mark.parametrize("kernels", ["", "sm90", "sm80"])
def test_random_index_topk(stress: Programs, kernels: str) -> None:
    check(stress.index_topk, 150, 1, kernels)


def test_random_delays_of_index_topk(chaos: Programs) -> None:
    check(chaos.index_topk, 50, 1, "sm90")


# Not synccheck for wide, for two teams and for scores: there roles meet at barriers that each of
# them reaches at a place of its own in the code, which the hardware and PTX allow and the tool does
# not (docs/kernels/decode_sm90.md).
@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("tool", "variant"),
    [("memcheck", v) for v in VARIANTS]
    + [("synccheck", v) for v in ("narrow", "narrow8", "narrow16")],
)
def test_sanitizer_is_clean(stress: Programs, tool: str, variant: str) -> None:
    sanitizer = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9"]
    check(*sanitizer, stress.decode, SANITIZED_CASES, 1, variant, SANITIZED_TOKENS)


# sm80 is in test_cuda_sanitizer.py, for any GPU. Not synccheck: the warp that rotates queries
# is such a role, too.
@pytest.mark.sanitizer
@pytest.mark.parametrize("variant", ["narrow", "wide"])
def test_sanitizer_is_clean_for_steps(stress: Programs, variant: str) -> None:
    sanitizer = ["compute-sanitizer", "--tool=memcheck", "--error-exitcode=9"]
    check(*sanitizer, stress.ragged, SANITIZED_CASES, 1, f"sm90:{variant}", SANITIZED_TOKENS)


@pytest.mark.sanitizer
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_sanitizer_is_clean_for_prefill(stress: Programs, tool: str) -> None:
    sanitizer = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=9"]
    check(*sanitizer, stress.prefill, SANITIZED_CASES, 1, "", SANITIZED_TOKENS)


@pytest.mark.sanitizer
@pytest.mark.parametrize("kernels", ["sm90", "sm80"])
def test_sanitizer_is_clean_for_index_topk(stress: Programs, kernels: str) -> None:
    sanitizer = ["compute-sanitizer", "--tool=memcheck", "--error-exitcode=9"]
    check(*sanitizer, stress.index_topk, SANITIZED_CASES, 1, kernels, SANITIZED_TOKENS)

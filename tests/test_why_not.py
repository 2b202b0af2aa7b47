"""Why "sm90" declines a call: the reasons follow from the table of kernels. Needs no GPU."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ("sm90/backend.cc", "sm90/choice.cc", "schedule/plan.cc", "schedule/unit_plan.cc")
FP8_TEAMS = 'needs an FP8 cache with d_ckv = 512 for "narrow16x2", got '
FP8_SCORES = 'needs an FP8 cache with d_ckv = 512 for "scores", got '
PAGES = "needs pages of a multiple of 64 tokens"
# dtype, d_ckv, d_kpe, format, page size, heads, num_splits, variant; how the reason begins, and
# how it ends. Empty: the call is taken.
CALLS = {
    "bfloat16 512 64 - 64 16 0 -": ("", ""),
    "bfloat16 512 64 - 1 128 0 -": ("", ""),
    "float16 512 64 - 16 64 0 -": ("", ""),
    "bfloat16 512 64 fp8_e4m3 16 64 0 -": ("", ""),
    "bfloat16 256 32 fp8_e4m3 16 64 0 -": ("", ""),
    "bfloat16 512 0 fp8_e4m3 64 16 0 -": ("", ""),
    "bfloat16 512 0 fp8_e4m3 16 64 0 -": ("", ""),
    "bfloat16 512 0 fp8_e4m3 64 16 0 narrow16x2": ("", ""),
    "bfloat16 512 64 fp8_e4m3 64 64 0 narrow": ("", ""),
    "bfloat16 512 64 fp8_e4m3 64 16 2 narrow16x2": ("", ""),
    "float32 512 64 - 64 16 0 -": ("needs bfloat16 or float16", ", got float32"),
    "float16 512 64 fp8_e4m3 64 16 0 -": (
        "needs queries in bfloat16 or float8_e4m3fn with an FP8 cache",
        ", got float16",
    ),
    "bfloat16 128 64 - 64 16 0 -": ("needs d_ckv, d_kpe = 512, 64 or 256, 32", ", got 128, 64"),
    "float16 512 0 - 64 16 0 -": ("needs d_ckv, d_kpe = 512, 64 or 256, 32", ", got 512, 0"),
    "bfloat16 512 64 - 64 16 0 narrow16x2": (FP8_TEAMS, "bfloat16 with 512"),
    "bfloat16 256 32 fp8_e4m3 64 16 0 narrow16x2": (FP8_TEAMS, "fp8_e4m3 with 256"),
    "bfloat16 512 64 fp8_e4m3 16 16 0 narrow16x2": (f'{PAGES} for "narrow16x2"', ", got 16"),
    "bfloat16 512 64 fp8_e4m3 16 16 0 narrow8": (f'{PAGES} for "narrow8"', ", got 16"),
    "bfloat16 512 64 - 64 64 0 scores": (FP8_SCORES, "bfloat16 with 512"),
    "bfloat16 512 64 fp8_e4m3 64 64 0 wide": (
        "needs a cache in bfloat16 or float16 with d_ckv = 512 or 256",
        ' for "wide", got fp8_e4m3 with 512',
    ),
    "bfloat16 512 64 - 64 16 0 fast": ('has no kernel "fast"', ""),
}


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs the headers of CUDA")
def test_reasons(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "why_not"
    command = ["nvcc", "-std=c++20", "--expt-relaxed-constexpr", "-DJAX_MLA_WITH_CUDA"]
    command += ["-DJAX_MLA_WITH_SM90A", f"-I{ROOT / 'csrc'}", "-o", str(program)]
    command += [str(ROOT / "tests/cuda/host/why_not.cc")]
    command += [str(ROOT / "csrc/decode" / source) for source in SOURCES]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [str(program)], input="\n".join(CALLS), capture_output=True, text=True, check=True
    )
    reasons = done.stdout.split("\n")[: len(CALLS)]
    for (call, (begin, end)), reason in zip(CALLS.items(), reasons, strict=True):
        assert bool(reason) == bool(begin), f"{call}: {reason}"
        assert reason.startswith(begin) and reason.endswith(end), f"{call}: {reason}"

"""The in-kernel trace: its reader on a small dump, and that the hooks still compile."""

import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable

import pytest
from cutlass_headers import INCLUDE, needs_cutlass

ROOT = pathlib.Path(__file__).resolve().parent.parent
PHASES = ["start", "QK", "wait for MMA"]
ROLES = ["math 0", "combine"]
# The wide kernel's math has no register to spare, nor has its producer that gathers; the trace
# takes two.
MAX_SPILL_BYTES = 256
EPOCH_NS = 1_800_000_000_000_000_007  # the GPU counts from 1970


@pytest.fixture(scope="module")
def tool() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("trace", ROOT / "tools/trace_to_perfetto.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def dump(tmp_path: pathlib.Path, tool: types.ModuleType) -> pathlib.Path:
    """Two warps on two SMs whose counters differ by far, at 2 cycles a ns."""
    data = json.dumps({"call": "1 x 64", "phases": PHASES, "roles": ROLES}).encode() + b"\n"
    near_wrap = (5 << 32) - 100  # the low half of the counter wraps within the track
    for sm, first, begin_ns in ((3, 1000, EPOCH_NS), (4, near_wrap, EPOCH_NS + 100)):
        events = [(first, 0), (first + 40, 1), (first + 240, 2)]
        data += tool.HEADER.pack(first, begin_ns, first + 400, begin_ns + 200, 3, sm, sm - 3, 0, 0)
        data += b"".join(tool.EVENT.pack(clock % (1 << 32), phase) for clock, phase in events)
    path = tmp_path / "dump"
    path.write_bytes(data)
    return path


def test_clocks_of_sms_meet(tool: types.ModuleType, dump: pathlib.Path) -> None:
    trace = tool.read_dump(dump)
    assert trace.cycles_per_ns == 2.0
    first, second = trace.tracks
    assert trace.ns(3, first.phases[1][1]) == pytest.approx(20)
    assert trace.ns(4, second.phases[2][1]) == pytest.approx(220)
    assert [end - begin for _, begin, end in second.phases] == [40, 200, 160]


def test_perfetto_events(tool: types.ModuleType, dump: pathlib.Path, tmp_path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "tools/trace_to_perfetto.py"), str(dump), "--json", out]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "| math 0 | QK | 1.0 | 200 | 0.10 |" in done.stdout
    events = json.loads(out.read_text())["traceEvents"]
    scores = [e for e in events if e["ph"] == "X" and e["name"] == "QK"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in scores] == [(3, 0.02, 0.1), (4, 0.12, 0.1)]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["math 0, warp 0, CTA 0", "math 0, warp 0, CTA 1"]


def test_picture(tool: types.ModuleType, dump: pathlib.Path, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("matplotlib")
    tool.draw(tool.read_dump(dump), [3, 4], 0.0, tmp_path / "out.png")
    assert (tmp_path / "out.png").stat().st_size > 1000


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@needs_cutlass
@pytest.mark.parametrize(
    "source",
    [
        "csrc/decode/sm90/narrow/kBf16_512_64_16_kNone_kBoxes_1.cu",
        "csrc/decode/sm90/codes64/kBf16_512_64_kOneScale_kBoxes_kTwoCodes.cu",
        "csrc/decode/sm90/wide/kBf16_512_64_kBoxes.cu",
        "csrc/decode/sm90/combine.cu",
    ],
)
def test_traced_kernels_compile(
    source: str, tmp_path: pathlib.Path, kernel_instances: Callable[[str], list[pathlib.Path]]
) -> None:
    sources = [*kernel_instances("csrc"), ROOT / "csrc/decode/sm90/combine.cu"]
    (path,) = [path for path in sources if path.match(source)]
    command = ["nvcc", "-O3", "-std=c++20", "-cubin", "-Xptxas", "-v", "--expt-relaxed-constexpr"]
    command += ["-DJAX_MLA_WITH_CUDA", "-DJAX_MLA_TRACE", "-gencode=arch=compute_90a,code=sm_90a"]
    command += [f"-I{ROOT / 'csrc'}", f"-I{INCLUDE}", str(path)]
    command += ["-o", str(tmp_path / "out.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", done.stdout + done.stderr)]
    assert spilled and max(spilled) <= MAX_SPILL_BYTES

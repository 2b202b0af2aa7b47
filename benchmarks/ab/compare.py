"""Time the decode kernels of several trees against each other, in one process on one card.

    benchmarks/ab/build.sh BEFORE_TREE before.so && benchmarks/ab/build.sh . after.so
    python benchmarks/ab/compare.py before.so after.so [--grid published|extra] [--json FILE]

Each library holds the Hopper kernels of one tree (`build.sh`). They take turns on the same rotating
caches, as captured CUDA graphs, so a ratio is good to about 1 %. Printed are microseconds a call of
the first library, the times of the others over it, and the relative errors against float64. Needs
PyTorch and a Hopper GPU, but neither JAX nor an installed jax_mla.
"""

import argparse
import ctypes
import json
import math
import pathlib
import re
import statistics
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from grid import SM_SCALE, Case, full_grid  # noqa: E402

CACHE_BYTES = 400e6  # of all caches that a graph goes through: far more than L2 holds
PAGE_SIZE = 64
WIDTH, D_CKV, D_KPE = 576, 512, 64
Q_PE_SCALE = 3.0  # as in workload.py
CHECKED_SEQUENCES = 4


class Call(ctypes.Structure):
    """`AbCall` of library.cu."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in
         ("q_nope", "q_pe", "pool", "page_table", "seq_lens", "zero", "out", "lse", "scratch")]
        + [("scratch_bytes", ctypes.c_int64)]
        + [(name, ctypes.c_int32) for name in
           ("batch", "q_len", "num_heads", "page_size", "max_pages_per_seq", "num_pages")]
        + [("sm_scale", ctypes.c_float)]
    )  # fmt: skip


def extra_grid() -> list[Case]:
    """Shapes beside the published grid: other heads, batches, lengths, and longer queries."""
    sizes = [(b, h, s) for h in (8, 32, 40, 96) for b in (1, 5, 24, 96) for s in (700, 3000)]
    sizes += [(48, 64, 20000), (48, 16, 20000), (192, 64, 1500), (192, 128, 1500), (64, 64, 512)]
    cases = [Case(b, h, s) for b, h, s in sizes]
    cases += [Case(b, h, 4096, q_len=q) for b, q in ((1, 16), (1, 64), (4, 64)) for h in (16, 128)]
    return cases + [Case(64, h, 1024, skewed=True) for h in (40, 64)]


class Work:
    """The arrays of one case: `caches` pools, and one output a library."""

    def __init__(self, case: Case, libraries: list[ctypes.CDLL]) -> None:
        """Make random data of the case."""
        torch.manual_seed(0)
        self.case = case
        lens = torch.tensor(case.seq_lens, dtype=torch.int32)
        pages = [int(n) for n in case.pages_per_seq]
        order = torch.randperm(sum(pages), dtype=torch.int32)
        table = torch.zeros(case.batch, max(pages), dtype=torch.int32)
        for row, part in zip(table, order.split(pages), strict=True):
            row[: len(part)] = part
        self.caches = max(2, math.ceil(CACHE_BYTES / case.cache_bytes))
        rows = (case.batch, case.q_len, case.num_heads)
        bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
        self.q_nope = torch.randn(*rows, D_CKV, **bf16)
        self.q_pe = Q_PE_SCALE * torch.randn(*rows, D_KPE, **bf16)
        self.pools = torch.empty(self.caches, sum(pages), PAGE_SIZE, WIDTH, **bf16)
        self.pools.normal_()
        self.table, self.lens = table.cuda(), lens.cuda()
        self.zero = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.outs = [torch.empty(*rows, D_CKV, **bf16) for _ in libraries]
        self.lse = torch.empty(rows, device="cuda")
        self.scratch = None
        scratch_bytes = max(lib.AbScratchBytes(ctypes.byref(self.call(0, 0))) for lib in libraries)
        self.scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device="cuda")

    def call(self, library: int, cache: int) -> Call:
        """The call of a library on a cache."""
        case, scratch = self.case, self.scratch
        return Call(
            self.q_nope.data_ptr(), self.q_pe.data_ptr(), self.pools[cache].data_ptr(),
            self.table.data_ptr(), self.lens.data_ptr(), self.zero.data_ptr(),
            self.outs[library].data_ptr(), self.lse.data_ptr(),
            None if scratch is None else scratch.data_ptr(),
            0 if scratch is None else scratch.numel(), case.batch, case.q_len, case.num_heads,
            PAGE_SIZE, self.table.shape[1], self.pools.shape[1], SM_SCALE,
        )  # fmt: skip

    def launch(self, libraries: list[ctypes.CDLL], library: int, cache: int) -> None:
        """Enqueue a call on the current stream."""
        error = ctypes.create_string_buffer(1024)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call = self.call(library, cache)
        if libraries[library].AbDecode(ctypes.byref(call), stream, error, 1024):
            raise RuntimeError(f"{self.case.label}: {error.value.decode()}")

    def expected(self, sequence: int) -> torch.Tensor:
        """[q_len, num_heads, d_ckv] float64 of a sequence of cache 0."""
        case, length = self.case, int(self.lens[sequence])
        pages = self.table[sequence, : -(-length // PAGE_SIZE)].long()
        keys = self.pools[0][pages].reshape(-1, WIDTH)[:length].double()
        queries = torch.cat([self.q_nope[sequence], self.q_pe[sequence]], dim=-1).double()
        scores = SM_SCALE * torch.einsum("qhd,td->qht", queries, keys)
        token = torch.arange(length, device="cuda")
        last = length - case.q_len + torch.arange(case.q_len, device="cuda")
        scores.masked_fill_(token > last[:, None, None], -math.inf)
        return torch.einsum("qht,td->qhd", scores.softmax(-1), keys[:, :D_CKV])


def errors(work: Work, libraries: list[ctypes.CDLL]) -> list[float]:
    """Relative error of each library, over some sequences, against float64."""
    step = max(1, work.case.batch // CHECKED_SEQUENCES)
    sequences = range(0, work.case.batch, step)
    want = [work.expected(s) for s in sequences]
    norm = math.sqrt(sum(float(w.square().sum()) for w in want))
    result = []
    for i in range(len(libraries)):
        work.launch(libraries, i, 0)
        off = [work.outs[i][s].double() - w for s, w in zip(sequences, want, strict=True)]
        result.append(math.sqrt(sum(float(x.square().sum()) for x in off)) / norm)
    return result


def times(work: Work, libraries: list[ctypes.CDLL], rounds: int, turn: float) -> list[list[float]]:
    """Microseconds a call: `rounds` for each library, in turns of about `turn` seconds."""
    calls = work.caches * max(1, 24 // work.caches)
    graphs = []
    for i in range(len(libraries)):
        work.launch(libraries, i, 0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for n in range(calls):
                work.launch(libraries, i, n % work.caches)
        graphs.append(graph)

    def run(graph: torch.cuda.CUDAGraph, replays: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / (replays * calls)

    replays = max(1, math.ceil(turn * 1e6 / (run(graphs[0], 1) * calls)))
    results: list[list[float]] = [[] for _ in libraries]
    for n in range(rounds):
        for i in range(len(libraries)):
            k = (i + n) % len(libraries)
            results[k].append(run(graphs[k], replays))
    return results


def main() -> None:
    """Compare the libraries on a grid and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("library", type=pathlib.Path, nargs="+")
    parser.add_argument("--grid", choices=("published", "extra", "both"), default="published")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="of the labels, as in the table"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--turn", type=float, default=8e-3, help="seconds")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    libraries = [ctypes.CDLL(str(path.resolve()), mode=1) for path in args.library]
    for library in libraries:
        library.AbScratchBytes.restype = ctypes.c_int64
    grids = {"published": full_grid(), "extra": extra_grid()}
    cases = grids["published"] + grids["extra"] if args.grid == "both" else grids[args.grid]
    cases = [case for case in cases if re.search(args.only, case.label)]
    rows = []
    print(" " * 24, *(path.stem.rjust(10) for path in args.library), " relative errors, 1e-3")
    for case in cases:
        work = Work(case, libraries)
        error = errors(work, libraries)
        samples = [statistics.median(x) for x in times(work, libraries, args.rounds, args.turn)]
        rows.append({"case": case.label, "us": samples, "relative_error": error})
        ratios = [f"{samples[0]:10.2f}", *(f"{x / samples[0]:10.3f}" for x in samples[1:])]
        print(f"{case.label:24}", *ratios, " ", *(f"{1e3 * x:.2f}" for x in error), flush=True)
        del work
    for i in range(1, len(libraries)):
        ratios = [row["us"][i] / row["us"][0] for row in rows]
        print(f"{args.library[i].stem}: mean {statistics.geometric_mean(ratios):.4f} "
              f"least {min(ratios):.3f} most {max(ratios):.3f}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()

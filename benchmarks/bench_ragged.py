"""Time engine steps of `ragged_paged_attention`, in turn with FlashInfer's one call for a step.

    python benchmarks/bench_ragged.py                    # all steps
    python benchmarks/bench_ragged.py --quick            # a few tiny ones for a CPU
    python benchmarks/bench_ragged.py --only 'x512@16384 h128'

Steps that are uniform are also timed without `cu_q_lens`, and as `append` and `decode`.
benchmarks/README.md says what is measured and explains the figures.
"""

import argparse
import dataclasses
import os
import re
import statistics
import time
from typing import Any

# Leaves memory for FlashInfer. JAX reads it when it is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import bars
import call_bench
import check
import contenders
import jax
import ragged_contenders
import ragged_grid
import ragged_work
import report
import timing
from peers import adapt, flashinfer

# What a causal attention kernel can sustain on an H200, where a plain product reaches 780.
H200_FLOPS = 700e12
COLUMNS = (
    ("case", "s"), ("us", ".1f"), ("kernels us", ".1f"), ("FlashInfer us", ".1f"),
    ("FlashInfer / ours", ".2f"), ("uniform us", ".1f"), ("decode us", ".1f"), ("floor us", ".1f"),
    ("x floor", ".2f"), ("spread", ".1%"), ("rel. error", ".1e"),
)  # fmt: skip
# With --table-tokens.
WIDE_COLUMNS = (("wide table us", ".1f"), ("max_seq_len us", ".1f"))
NOTES = (
    "us: ragged_paged_attention with cu_q_lens. It writes the new rows and attends to them",
    "FlashInfer us: it attends only, to rows that are in its cache already; its plan is not timed",
    "uniform us: ours without cu_q_lens, where all sequences have the same number of new tokens",
    "decode us: our append then decode with that q_len; for one token a sequence decode alone",
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = report.argument_parser(__doc__, repeats=7)
    parser.add_argument("--quick", action="store_true", help="a few tiny steps that fit a CPU")
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose names match")
    parser.add_argument("--backend", help="backend of our ops (default: what they choose)")
    parser.add_argument(
        "--table-tokens",
        type=int,
        metavar="N",
        help="also time ours in a page table of N tokens, without max_seq_len and with it",
    )
    call_bench.add_arguments(parser)
    return parser.parse_args(argv)


class Bench(call_bench.CallBench):
    """One run over a list of steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Begin without a peer; on an H200 the ceiling is that of causal attention."""
        super().__init__(args)
        if "H200" in self.device.device_kind and not args.tflop_per_s:
            self.ceilings = dataclasses.replace(self.ceilings, flops_per_s=H200_FLOPS)
        self.peer = ""
        self.missing = ""

    def run_case(self, case: ragged_grid.RaggedCase) -> dict[str, Any]:
        """Check and time one step; return its row."""
        work = ragged_work.make(case, self.cache_bytes)
        written = work.written()
        row, floor, calls = self.begin_row(work)
        checked = check.Check.of(work)
        errors: dict[str, float] = {}
        ours: list[contenders.ChainedCalls] = []
        ways = ragged_contenders.ways(work, written, self.args.backend, self.args.table_tokens)
        for name, (call, operands) in ways.items():
            try:
                result = checked.call(operands, call)
                if isinstance(result, tuple):
                    result, pools = result
                    same = pools[checked.cache] == written.pools[checked.cache]
                    assert same.all(), "kv_pages: differs from what XLA's scatter writes"
                errors[name] = checked.relative_error(result)
                caches = work.num_caches
                chained = contenders.ChainedCalls(name, call, operands, caches=caches, calls=calls)
                ours.append(chained)
            except AssertionError as error:
                row["wrong"][name] = str(error)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                row["refused"][name] = str(error)
        timed: list[timing.Contender] = [*ours]
        adapter, reason = adapt(flashinfer, written)
        self.missing = self.missing or reason
        try:
            if adapter is not None:
                self.peer = adapter.description
                errors[flashinfer.NAME] = checked.relative_error(adapter.outputs(checked.cache))
                timed.append(adapter.contender(calls))
        except AssertionError as error:
            row["wrong"][flashinfer.NAME] = str(error)
        except RuntimeError as error:
            row["refused"][flashinfer.NAME] = str(error)
        self._time(row, timed, floor, errors)
        self.add_traces(row, ours)
        return row

    def _time(self, row, timed, floor, errors) -> None:
        for contender, sample in zip(timed, self.time(timed, floor), strict=True):
            row["times"][contender.name] = call_bench.timed_entry(contender, sample) | {
                "over_floor": sample.seconds / floor,
                "relative_error": errors[contender.name],
            }


def ratio_of(row: dict[str, Any]) -> float | None:
    """Return FlashInfer's time over ours, if both were timed."""
    times = row["times"]
    if flashinfer.NAME not in times or "jax_mla" not in times:
        return None
    return times[flashinfer.NAME]["us"] / times["jax_mla"]["us"]


def print_row(table: report.Table, row: dict[str, Any], *, has_wide_table: bool) -> None:
    """Print a row and what it lacks."""
    times = row["times"]
    ours = times.get("jax_mla", {})
    us = {name: entry["us"] for name, entry in times.items()}
    table.row([
        row["case"], us.get("jax_mla"), ours.get("kernels_us"), us.get(flashinfer.NAME),
        ratio_of(row), us.get("uniform"),
        us.get("append, decode", us.get("decode")), row["floor_us"], ours.get("over_floor"),
        ours.get("spread"), ours.get("relative_error"),
        *(us.get(f"jax_mla{name}") for name in (bars.WIDE_TABLE, bars.BOUND) if has_wide_table),
    ])  # fmt: skip
    for name, entry in times.items():
        if any("memcpy" in kernel.lower() for kernel in entry.get("kernels", ())):
            print(f"# {row['case']}: XLA copies arrays between the calls of {name}")
    call_bench.print_lacking(row)


def print_ratios(ratios: dict[str, list[float]]) -> None:
    """Print FlashInfer's times over ours, given those of the steps by number of heads."""
    for name, some in ratios.items():
        figures = f"mean {statistics.mean(some):.2f}, from {min(some):.2f} to {max(some):.2f}"
        print(f"# FlashInfer / ours, {name}: {figures}, {len(some)} steps")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the process's exit status."""
    args = parse_arguments(argv)
    begin = time.perf_counter()
    bench = Bench(args)
    grid = ragged_grid.quick_grid() if args.quick else ragged_grid.full_grid()
    cases = [case for case in grid if re.search(args.only, case.label)]
    output = report.Report(args.json, bench.device, bench.ceilings)
    for note in NOTES:
        print(f"# {note}")
    has_wide_table = args.table_tokens is not None
    table = report.Table(COLUMNS + WIDE_COLUMNS * has_wide_table)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    failed: dict[str, str] = {}
    ratios: dict[str, list[float]] = {}
    for case in cases:
        if args.budget_s and time.perf_counter() - begin > args.budget_s:
            left_out.append(case.label)
            continue
        try:
            rows.append(bench.run_case(case))
            print_row(table, rows[-1], has_wide_table=has_wide_table)
            if (ratio := ratio_of(rows[-1])) is not None:
                for name in (f"{case.num_heads} heads", "all"):
                    ratios.setdefault(name, []).append(ratio)
        except jax.errors.JaxRuntimeError as error:  # most likely out of memory
            failed[case.label] = str(error)
            print(f"# {case.label} FAILED: {error}")
        output.save(
            rows=rows, left_out=left_out, failed=failed, peer=bench.peer, missing=bench.missing
        )
    print(f"# FlashInfer: {bench.peer or 'not timed'} {bench.missing}".rstrip())
    print_ratios(ratios)
    if left_out:
        print(f"# left out after {args.budget_s:g} s: {', '.join(left_out)}")
    print(f"# {time.perf_counter() - begin:.0f} s in all")
    output.save(rows=rows, left_out=left_out, failed=failed, peer=bench.peer, missing=bench.missing)
    return 1 if failed or any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())

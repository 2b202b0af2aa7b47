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
import time
from typing import Any

# Leaves memory for FlashInfer. JAX reads it when it is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import check
import contenders
import jax
import ragged_contenders
import ragged_grid
import ragged_work
import report
import roofline
import timing
from peers import adapt, flashinfer

# What a causal attention kernel can sustain on an H200, where a plain product reaches 780.
H200_FLOPS = 700e12
COLUMNS = (
    ("case", "s"), ("us", ".1f"), ("kernels us", ".1f"), ("FlashInfer us", ".1f"),
    ("FlashInfer / ours", ".2f"), ("uniform us", ".1f"), ("decode us", ".1f"), ("floor us", ".1f"),
    ("x floor", ".2f"), ("spread", ".1%"), ("rel. error", ".1e"),
)  # fmt: skip
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
    parser.add_argument("--cache-mb", type=float, help="total of the rotating caches (GPU 400)")
    parser.add_argument("--dispatch-ms", type=float, help="least time of a dispatch (GPU 1.5)")
    parser.add_argument("--tb-per-s", type=float, help="memory ceiling to use for the floor")
    parser.add_argument("--tflop-per-s", type=float, help="arithmetic ceiling to use for the floor")
    parser.add_argument("--budget-s", type=float, help="leave out rows not begun after this time")
    return parser.parse_args(argv)


class Bench:
    """One run over a list of steps."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Pick the device and its defaults."""
        self.args = args
        self.device = jax.devices()[0]
        self.on_gpu = self.device.platform in ("gpu", "cuda")
        self.ceilings = roofline.ceilings_for(
            self.device, tb_per_s=args.tb_per_s, tflop_per_s=args.tflop_per_s
        )
        if "H200" in self.device.device_kind and not args.tflop_per_s:
            self.ceilings = dataclasses.replace(self.ceilings, flops_per_s=H200_FLOPS)
        self.cache_bytes = 1e6 * (args.cache_mb or (400 if self.on_gpu else 128))
        self.dispatch_seconds = 1e-3 * (args.dispatch_ms or (1.5 if self.on_gpu else 20))
        self.peer = ""
        self.missing = ""

    def run_case(self, case: ragged_grid.RaggedCase) -> dict[str, Any]:
        """Check and time one step; return its row."""
        work = ragged_work.make(case, self.cache_bytes)
        written = work.written()
        floor = roofline.floor_seconds(case, self.ceilings)
        row: dict[str, Any] = {
            "case": case.label,
            "floor_us": floor * 1e6,
            "bytes": roofline.num_bytes(case),
            "flops": roofline.num_flops(case),
            "num_caches": work.num_caches,
            "times": {},
            "refused": {},
            "wrong": {},
        }
        calls = timing.calls_per_dispatch(
            work.num_caches, 1.1 * floor + 5e-6, min_seconds=self.dispatch_seconds
        )
        checked = check.Check.of(work)
        errors: dict[str, float] = {}
        timed: list[timing.Contender] = []
        ways = ragged_contenders.ways(work, written, self.args.backend)
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
                timed.append(chained)
            except AssertionError as error:
                row["wrong"][name] = str(error)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                row["refused"][name] = str(error)
        in_jax = list(timed)
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
        if self.on_gpu and not self.args.no_trace:
            for contender in in_jax:
                row["times"][contender.name] |= contenders.trace(
                    contender, self.device.local_hardware_id or 0
                )
        return row

    def _time(self, row, timed, floor, errors) -> None:
        samples = timing.time_in_turn(
            timed,
            repeats=self.args.repeats,
            min_seconds=timing.turn_seconds(floor, on_gpu=self.on_gpu),
            min_dispatches=8 if self.on_gpu else 2,
        )
        for contender, sample in zip(timed, samples, strict=True):
            row["times"][contender.name] = {
                "us": sample.seconds * 1e6,
                "over_floor": sample.seconds / floor,
                "spread": sample.spread,
                "calls_per_dispatch": contender.calls,
                "dispatches": sample.dispatches,
                "host_us_per_dispatch": sample.host_seconds * 1e6,
                "relative_error": errors[contender.name],
            }


def print_row(table: report.Table, row: dict[str, Any]) -> None:
    """Print a row and what it lacks."""
    times = row["times"]
    ours = times.get("jax_mla", {})
    us = {name: entry["us"] for name, entry in times.items()}
    peer = us.get(flashinfer.NAME)
    table.row([
        row["case"], us.get("jax_mla"), ours.get("kernels_us"), peer,
        peer / ours["us"] if peer and ours else None, us.get("uniform"),
        us.get("append, decode", us.get("decode")), row["floor_us"], ours.get("over_floor"),
        ours.get("spread"), ours.get("relative_error"),
    ])  # fmt: skip
    for name, entry in times.items():
        if any("memcpy" in kernel.lower() for kernel in entry.get("kernels", ())):
            print(f"# {row['case']}: XLA copies arrays between the calls of {name}")
    for name, reason in row["refused"].items():
        print(f"# {row['case']}: {name} does not serve it: {reason}")
    for name, reason in row["wrong"].items():
        print(f"# {row['case']}: {name} is WRONG and was not timed: {reason}")


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
    table = report.Table(COLUMNS)
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    failed: dict[str, str] = {}
    for case in cases:
        if args.budget_s and time.perf_counter() - begin > args.budget_s:
            left_out.append(case.label)
            continue
        try:
            rows.append(bench.run_case(case))
            print_row(table, rows[-1])
        except jax.errors.JaxRuntimeError as error:  # most likely out of memory
            failed[case.label] = str(error)
            print(f"# {case.label} FAILED: {error}")
        output.save(
            rows=rows, left_out=left_out, failed=failed, peer=bench.peer, missing=bench.missing
        )
    print(f"# FlashInfer: {bench.peer or 'not timed'} {bench.missing}".rstrip())
    if left_out:
        print(f"# left out after {args.budget_s:g} s: {', '.join(left_out)}")
    print(f"# {time.perf_counter() - begin:.0f} s in all")
    output.save(rows=rows, left_out=left_out, failed=failed, peer=bench.peer, missing=bench.missing)
    return 1 if failed or any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())

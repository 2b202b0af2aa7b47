"""Time `jax_mla.index_topk` and `index_append` under `jit`, in turn with DeepGEMM and `torch.topk`.

    python benchmarks/bench_index.py                    # the published rows
    python benchmarks/bench_index.py --quick            # a few tiny ones for a CPU
    python benchmarks/bench_index.py --batch 32 --seq 8192 65536 --heads 16

benchmarks/README.md says what is measured and explains the figures.
"""

import argparse
import os
import re
import time
from typing import Any

# Leaves memory for torch. JAX reads it when it is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import call_bench
import decode_rows
import index_bars
import index_contenders
import index_grid
import index_work
import jax
import report
import timing
from peers import adapt, deep_gemm

PEERS = (deep_gemm,)
COLUMNS = (
    ("case", "s"), ("implementation".ljust(23), "s"), ("us", ".2f"), ("kernels us", ".2f"),
    ("floor us", ".2f"), ("TB/s", ".3g"), ("TFLOP/s", ".4g"), ("spread", ".1%"),
    ("other entries", ".1e"), ("us / scores", ".2f"),
)  # fmt: skip
_APPEND_LAYERS = 60


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = report.argument_parser(__doc__, repeats=7)
    index_grid.add_arguments(parser)
    call_bench.add_contenders(parser, PEERS)
    call_bench.add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        args.cases, args.appends = index_grid.cases_from_arguments(args)
    except (ValueError, re.error) as error:
        parser.error(str(error))
    return args


class Bench(call_bench.PeerBench):
    """One run over a list of calls."""

    def floor_seconds(self, case: index_grid.IndexCase) -> float:
        """The least time of a call. Products of codes run at twice the rate of 16-bit types."""
        return max(
            case.num_bytes / self.ceilings.bytes_per_s,
            case.num_flops / (2 * self.ceilings.flops_per_s),
        )

    def run_case(self, case: index_grid.IndexCase) -> dict[str, Any]:
        """Check and time one call of `index_topk`; return its row."""
        work = index_work.make(case, index_work.num_caches(case, self.cache_bytes))
        floor = self.floor_seconds(case)
        row: dict[str, Any] = {
            "case": case.label, "floor_us": floor * 1e6, "bytes": case.num_bytes,
            "flops": case.num_flops, "num_caches": work.num_caches, "times": {}, "refused": {},
            "wrong": {},
        }  # fmt: skip
        least = floor + (3e-6 if self.on_gpu else 3e-4)
        calls = timing.calls_per_dispatch(work.num_caches, least, min_seconds=self.dispatch_seconds)
        checked = index_work.Check.of(work)
        others: dict[str, float] = {}
        ours = self._ours(work, checked, calls, row, others)
        timed: list[timing.Contender] = [*ours, *self._theirs(work, checked, calls, row)]
        for contender, sample in zip(timed, self.time(timed, floor), strict=True):
            row["times"][contender.name] = call_bench.timed_entry(contender, sample) | {
                "tb_per_s": case.num_bytes / sample.seconds / 1e12,
                "tflop_per_s": case.num_flops / sample.seconds / 1e12,
                "over_floor": sample.seconds / floor,
                "other_entries": others.get(contender.name),
            }
        self.add_traces(row, ours)
        return row

    def _ours(self, work, checked, calls, row, others) -> list[index_contenders.TopkCalls]:
        """Our contenders whose lists are right."""
        found = []
        for name in self.args.backend:
            label = "jax_mla" if name == "auto" else f"jax_mla {name}"
            backend = None if name == "auto" else name
            call = index_contenders.index_topk(work, backend)
            try:
                lists = jax.jit(call, static_argnums=5)(*work.operands, checked.cache)
                others[label] = checked.other_entries(*lists)
                found.append(index_contenders.TopkCalls(label, work, calls, backend))
            except AssertionError as error:
                row["wrong"][label] = str(error)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                row["refused"][label] = str(error)
        return found

    def _theirs(self, work, checked, calls, row) -> list[timing.Contender]:
        """The peers' contenders whose scores are right."""
        found: list[timing.Contender] = []
        for peer in PEERS:
            if peer.NAME not in self.args.peers:
                continue
            adapter, reason = adapt(peer, work)
            if adapter is None:
                self.missing.setdefault(peer.NAME, reason)
                continue
            self.peers[peer.NAME] = adapter.description
            try:
                scores = adapter.scores(checked.cache, checked.queries)
                row["peer_relative_error"] = checked.relative_error(scores)
                found += adapter.contenders(calls)
            except AssertionError as error:
                row["wrong"][peer.NAME] = str(error)
            except (RuntimeError, TypeError, ValueError) as error:
                row["refused"][peer.NAME] = f"{type(error).__name__}: {error}"
        return found

    def run_append(self, case: index_grid.AppendCase) -> dict[str, Any]:
        """Check and time one call of `index_append`, beside `append`; return its row."""
        layers = _APPEND_LAYERS if self.on_gpu else 2
        calls = 4 * layers if self.on_gpu and case.batch * case.q_len < 1024 else layers
        row: dict[str, Any] = {"case": case.label, "times": {}, "refused": {}, "wrong": {}}
        try:
            index_contenders.check_append(case)
        except AssertionError as error:
            row["wrong"]["jax_mla"] = str(error)
            return row
        timed = index_contenders.append_calls(case, layers, calls)
        num_bytes = index_contenders.append_bytes(case)
        for contender, sample in zip(timed, self.time(timed, 0.0), strict=True):
            row["times"][contender.name] = call_bench.timed_entry(contender, sample) | {
                "tb_per_s": num_bytes / sample.seconds / 1e12
            }
        self.add_traces(row, timed)
        return row


def print_row(table: report.Table, row: dict[str, Any]) -> None:
    """Print a line for every contender of a row, and what it lacks."""
    for name, entry in row["times"].items():
        ours = name.startswith("jax_mla") and name != "jax_mla append"
        table.row([
            row["case"], name, entry["us"], entry.get("kernels_us"), row.get("floor_us"),
            entry["tb_per_s"], entry.get("tflop_per_s"), entry["spread"],
            entry.get("other_entries"), index_bars.over_scores(row, name) if ours else None,
        ])  # fmt: skip
    call_bench.print_lacking(row)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the process's exit status."""
    args = parse_arguments(argv)
    begin = time.perf_counter()
    bench = Bench(args)
    output = report.Report(args.json, bench.device, bench.ceilings)
    table = report.Table(COLUMNS)
    rows: dict[index_grid.IndexCase, dict[str, Any]] = {}
    appends: list[dict[str, Any]] = []
    left_out: list[str] = []
    failed: dict[str, str] = {}

    def save(**more: Any) -> None:
        output.save(
            rows=list(rows.values()), appends=appends, left_out=left_out, failed=failed,
            peers=bench.peers, missing=bench.missing, **more,
        )  # fmt: skip

    for case in (*args.appends, *args.cases):
        if args.budget_s and time.perf_counter() - begin > args.budget_s:
            left_out.append(case.label)
            continue
        try:
            if isinstance(case, index_grid.AppendCase):
                appends.append(row := bench.run_append(case))
            else:
                rows[case] = row = bench.run_case(case)
        except jax.errors.JaxRuntimeError as error:  # most likely out of memory
            failed[case.label] = str(error)
            print(f"# {case.label} FAILED: {error}")
            continue
        print_row(table, row)
        save()
    bench.print_peers(left_out)
    on_h200 = "H200" in bench.device.device_kind
    ours = "jax_mla" if "auto" in args.backend else f"jax_mla {args.backend[0]}"
    reached = index_bars.reached(rows, appends, ours, on_h200=on_h200)
    if reached:
        decode_rows.print_bars(reached)
    print(f"# {time.perf_counter() - begin:.0f} s in all")
    save(bars=index_bars.as_json(reached))
    wrong = any(row["wrong"] for row in (*rows.values(), *appends))
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

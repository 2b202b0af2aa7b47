"""Time paged MLA decode under `jit`, beside the roofline and other implementations.

    python benchmarks/bench_decode.py                    # the published grid
    python benchmarks/bench_decode.py --quick            # a small grid for a CPU
    python benchmarks/bench_decode.py --batch 32 --heads 8 20 --seq 4096 skewed:2048

benchmarks/README.md says what is measured and explains the figures.
"""

import argparse
import dataclasses
import functools
import os
import time
from typing import Any

# Leaves memory for the torch peers. JAX reads it when it is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import bars
import call_bench
import check
import contenders
import decode_rows
import grid
import jax
import jax.numpy as jnp
import report
import timing
import workload
from peers import adapt, flash_mla, flash_mla_fp8, flashinfer, xla
from tqdm import tqdm

TORCH_PEERS = (flash_mla, flash_mla_fp8, flashinfer)
# A row is flagged if its time per call changes by more than this when a dispatch holds twice as
# many calls.
DOUBLING_LIMIT = 0.03


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = report.argument_parser(__doc__, repeats=7)
    grid.add_arguments(parser)
    parser.add_argument(
        "--backend",
        nargs="+",
        default=["auto"],
        help="backends of jax_mla.decode to time: auto, sm90, sm80, cpu, reference (default auto)",
    )
    parser.add_argument(
        "--kv-format",
        nargs="+",
        default=[],
        choices=("fp8_e4m3", "fp8_ds_mla"),
        help="also time ours, and peers that can, with a cache in these formats",
    )
    parser.add_argument(
        "--query-codes",
        action="store_true",
        help="with fp8_e4m3, also time ours with queries in e4m3, as flash_mla_fp8 has them",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        default=[peer.NAME for peer in TORCH_PEERS],
        choices=(*(peer.NAME for peer in TORCH_PEERS), "reference", "xla"),
        help="other implementations to time in turn with ours: torch packages where installed, "
        "the jitted reference, plain XLA in the input's dtype (default: the torch packages)",
    )
    parser.add_argument(
        "--table-tokens",
        type=int,
        metavar="N",
        help="also time ours in a page table of N tokens, without max_seq_len and with it",
    )
    parser.add_argument(
        "--max-seq-len",
        type=int,
        metavar="N",
        help="that bound, with --table-tokens (default: the longest length of a row)",
    )
    parser.add_argument("--png", metavar="PATH", help="draw time over floor there")
    call_bench.add_arguments(parser)
    parser.add_argument(
        "--max-caches", type=int, help="most rotating caches (the published table has 32)"
    )
    parser.add_argument("--no-check", action="store_true", help="do not check results first")
    parser.add_argument(
        "--no-doubling", action="store_true", help="do not check that the host's time is hidden"
    )
    args = parser.parse_args(argv)
    if args.query_codes and "fp8_e4m3" not in args.kv_format:
        parser.error("--query-codes: expected --kv-format fp8_e4m3 too")
    if args.max_seq_len and not args.table_tokens:
        parser.error("--max-seq-len: expected --table-tokens too, got none")
    return args


class Bench(call_bench.PeerBench):
    """One run over a list of cases."""

    def ways(
        self, works: list[workload.Workload]
    ) -> dict[str, tuple[contenders.DecodeFn, workload.Workload]]:
        """The JAX contenders of a case and the work that each does, by name; ours first.

        Args:
          works: The same call with the plain caches, then with those in each other format.
        """
        ours, work = {}, works[0]
        scale = work.sm_scale
        for backend in self.args.backend:
            name = "jax_mla" if backend == "auto" else f"jax_mla {backend}"
            decode = functools.partial(
                contenders.jax_mla_decode, scale, None if backend == "auto" else backend
            )
            for way in works:
                ours[way.named(name)] = decode(**way.options), way
            if self.args.table_tokens:
                wide = work.in_wide_table(self.args.table_tokens)
                bound = self.args.max_seq_len or int(work.case.seq_lens.max())
                ours[name + bars.WIDE_TABLE] = decode(), wide
                ours[name + bars.BOUND] = decode(max_seq_len=bound), wide
        if "reference" in self.args.peers:
            ours["reference"] = xla.reference(scale), work
        if "xla" in self.args.peers:
            ours["xla"] = xla.plain(scale), work
        return ours

    def adapters(self, works: list[workload.Workload]) -> dict[str, tuple[Any, workload.Workload]]:
        """The torch peers by name, each with its work. `missing` says why others cannot run it."""
        found = {}
        for peer in TORCH_PEERS:
            if peer.NAME not in self.args.peers:
                continue
            for way in works:
                if way.has_query_codes != getattr(peer, "TAKES_QUERY_CODES", False):
                    continue
                name = way.named(peer.NAME)
                adapter, reason = adapt(peer, way)
                if adapter is None:
                    self.missing.setdefault(name, reason)
                else:
                    found[name] = adapter, way
                    self.peers[name] = adapter.description
        return found

    def run_case(self, work: workload.Workload) -> dict[str, Any]:
        """Check and time one case; return its row."""
        args = self.args
        row, floor, calls = self.begin_row(work)
        row["auto_backend"] = contenders.chosen_backend(work.operands)
        works = [work, *map(work.stored_as, args.kv_format)]
        if args.query_codes:
            works += [w.with_query_codes() for w in works if w.kv_format == "fp8_e4m3"]
        # By name: the values of the cache and of the queries differ.
        checks = {} if args.no_check else {way.named(""): check.Check.of(way) for way in works}
        errors: dict[str, float] = {}
        ours: list[contenders.ChainedCalls] = []
        half: list[contenders.ChainedCalls] = []
        for name, (decode, way) in self.ways(works).items():
            try:
                if checks:
                    checked = checks[way.named("")]
                    errors[name] = checked.relative_error(checked.call(way.operands, decode))
                chained = functools.partial(
                    contenders.ChainedCalls, name, *_chain(decode, way), caches=work.num_caches
                )
                ours.append(chained(calls=calls))
                if not args.no_doubling:
                    half.append(chained(calls=calls // 2))
            except AssertionError as error:
                row["wrong"][name] = str(error)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                row["refused"][name] = str(error)
        full: list[timing.Contender] = [*ours]
        for name, (adapter, way) in self.adapters(works).items():
            try:
                if checks:
                    checked = checks[way.named("")]
                    most = getattr(adapter, "max_relative_error", None)
                    errors[name] = checked.relative_error(adapter.outputs(checked.cache), most)
                full.append(adapter.contender(calls))
                if name == flash_mla.NAME:
                    full.append(adapter.with_schedule(calls))
            except AssertionError as error:
                row["wrong"][name] = str(error)
            except RuntimeError as error:
                row["refused"][name] = str(error)
        self._time(row, full, half, floor, errors)
        self.add_traces(row, ours)
        return row

    def _time(self, row, full, half, floor, errors) -> None:
        samples = self.time([*full, *half], floor)
        doubling = {c.name: s.seconds for c, s in zip(half, samples[len(full) :], strict=True)}
        for contender, sample in zip(full, samples, strict=False):
            entry = call_bench.timed_entry(contender, sample) | {
                "over_floor": sample.seconds / floor,
                "tb_per_s": row["bytes"] / sample.seconds / 1e12,
                "tflop_per_s": row["flops"] / sample.seconds / 1e12,
                "compile_s": getattr(contender, "compile_seconds", None),
                "relative_error": errors.get(contender.name),
            }
            if contender.name in doubling:
                entry["doubling"] = doubling[contender.name] / sample.seconds - 1
                entry["suspect"] = abs(entry["doubling"]) > DOUBLING_LIMIT
            row["times"][contender.name] = entry


def _chain(decode: contenders.DecodeFn, work: workload.Workload) -> tuple[Any, tuple[Any, ...]]:
    """What ChainedCalls calls, and its operands."""
    if not work.has_query_codes:
        return decode, work.operands
    q_nope, *rest = work.operands
    carry = q_nope, jnp.float32(work.options["q_scale"])
    return contenders.chained_by_scale(decode), (carry, *rest)


def run_grid(
    bench: Bench, cases: list[grid.Case], begin: float, output: report.Report
) -> decode_rows.Results:
    """Time the cases, print each row as it comes and keep the JSON file up to date."""
    args, results = bench.args, decode_rows.Results()
    recorded = grid.recorded_peers() if "H200" in bench.device.device_kind else {}
    table = report.Table(decode_rows.COLUMNS, write=tqdm.write)
    with tqdm(total=len(cases), unit="case", disable=None) as progress:
        for group in grid.by_pool(cases):
            pools = None
            for case in group:
                if args.budget_s and time.perf_counter() - begin > args.budget_s:
                    results.left_out.append(case.label)
                    continue
                try:
                    if pools is None:
                        caches = workload.num_caches(case, bench.cache_bytes, most=args.max_caches)
                        pools = workload.make_pools(case, caches)
                    row = bench.run_case(workload.make_workload(case, *pools))
                except jax.errors.JaxRuntimeError as error:  # most likely out of memory
                    results.failed[case.label] = str(error)
                    tqdm.write(f"# {case.label} FAILED: {error}")
                    continue
                results.rows[case] = row
                known = recorded.get(case)
                if known:
                    row["recorded"] = dataclasses.asdict(known)
                decode_rows.print_row(table, row, known.best_us if known else None)
                call_bench.print_lacking(row, tqdm.write)
                output.save(**results.as_json(cases), peers=bench.peers, missing=bench.missing)
                progress.update()
    return results


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the process's exit status."""
    args = parse_arguments(argv)
    begin = time.perf_counter()
    bench = Bench(args)
    cases = grid.cases_from_arguments(args)
    output = report.Report(args.json, bench.device, bench.ceilings)
    results = run_grid(bench, cases, begin, output)
    bench.print_peers(results.left_out)
    summary = decode_rows.summarize(results.rows)
    decode_rows.print_summary(summary)
    ours = next((name for name in summary if name.startswith("jax_mla")), "")
    reached = bars.reached(results.rows, ours, on_h200="H200" in bench.device.device_kind)
    if reached:
        decode_rows.print_bars(reached)
    print(f"# {time.perf_counter() - begin:.0f} s in all")
    content = results.as_json(cases)
    output.save(
        **content,
        peers=bench.peers,
        missing=bench.missing,
        summary=summary,
        bars=[dataclasses.asdict(bar) for bar in reached],
    )
    if args.png and results.rows:
        report.plot_over_floor(args.png, output.facts, content["rows"])
    wrong = any(row["wrong"] for row in results.rows.values())
    return 1 if wrong or results.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

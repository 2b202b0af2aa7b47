"""Time `jax_mla.sparse_attention` under `jit`, in turn with FlashMLA's sparse kernels.

    python benchmarks/bench_sparse.py                    # the published rows
    python benchmarks/bench_sparse.py --quick            # a few tiny ones for a CPU
    python benchmarks/bench_sparse.py --batch 32 --heads 64 128 --topk 1024 --kv-format fp8_ds_mla

benchmarks/README.md says what is measured and explains the figures.
"""

import argparse
import dataclasses
import os
import re
import time
from typing import Any

# Leaves memory for FlashMLA. JAX reads it when it is imported.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import bars
import call_bench
import check
import contenders
import decode_rows
import jax
import report
import roofline
import sparse_grid
import sparse_work
import timing
import workload
from peers import adapt, flash_mla_sparse, why_not

import jax_mla

PEERS = (flash_mla_sparse,)
PLAIN = "plain"
COLUMNS = (
    ("case", "s"), ("implementation", "s"), ("us", ".1f"), ("kernels us", ".1f"),
    ("floor us", ".1f"), ("x floor", ".2f"), ("TB/s", ".3g"), ("TFLOP/s", ".3g"),
    ("spread", ".1%"), ("rel. error", ".1e"), ("peer / ours", ".2f"), ("backend", "s"),
)  # fmt: skip


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = report.argument_parser(__doc__, repeats=7)
    sparse_grid.add_arguments(parser)
    parser.add_argument(
        "--kv-format",
        nargs="+",
        default=[PLAIN, "fp8_ds_mla", "fp8_e4m3"],
        choices=(PLAIN, "fp8_ds_mla", "fp8_e4m3"),
        help="formats of our cache to time (default: all)",
    )
    call_bench.add_contenders(parser, PEERS)
    call_bench.add_arguments(parser)
    parser.add_argument("--max-caches", type=int, help="most rotating caches")
    args = parser.parse_args(argv)
    try:
        args.cases = sparse_grid.cases_from_arguments(args)
        args.cases = [case for case in args.cases if re.search(args.only, case.label)]
    except (ValueError, re.error) as error:
        parser.error(str(error))
    return args


def sparse_attention(sm_scale: float, backend: str | None, options: dict[str, Any]) -> Any:
    """`jax_mla.sparse_attention` on one cache of the stacked pool."""

    def call(q_nope, q_pe, pools, indices, topk_lens, layer):
        return jax_mla.sparse_attention(
            q_nope,
            q_pe,
            pools,
            indices,
            sm_scale=sm_scale,
            topk_lens=topk_lens,
            layer=layer,
            backend=backend,
            **options,
        )

    return call


def chosen_backend(work: sparse_work.SparseWorkload) -> str | None:
    """The backend that `backend=None` picks: that of `decode` with pages of one token."""
    case, pools = work.case, work.pools

    def shaped(x: jax.Array, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, x.dtype)

    q_nope, q_pe = (
        shaped(x, case.num_tokens, 1, case.num_heads, x.shape[-1]) for x in (work.q_nope, work.q_pe)
    )
    slots = pools.shape[1] * pools.shape[2]
    statuses = jax_mla.backends(
        q_nope,
        q_pe,
        shaped(pools, pools.shape[0], slots, 1, pools.shape[-1]),
        shaped(work.indices, case.num_tokens, case.topk),
        layer=0,
        kv_format=work.kv_format,
    )
    return next((status.name for status in statuses if status.chosen), None)


class Bench(call_bench.PeerBench):
    """One run over a list of calls."""

    def make_caches(self, case: sparse_grid.SparseCase) -> dict[str | None, workload.Workload]:
        """Return workloads whose caches a group of calls shares, by format; the plain one first."""
        args = self.args
        caches = sparse_work.num_caches(case, self.cache_bytes, most=args.max_caches)
        plain = workload.make_workload(case, *workload.make_pools(case, caches))
        wanted = {None if name == PLAIN else name for name in args.kv_format}
        wanted |= {
            peer.kv_format_of(case)
            for peer in PEERS
            if peer.NAME in args.peers and not why_not(peer, case, peer.kv_format_of(case))
        }
        stored = {name: plain.stored_as(name) for name in sorted(filter(None, wanted))}
        return {None: plain, **stored}

    def run_case(
        self, case: sparse_grid.SparseCase, caches: dict[str | None, workload.Workload]
    ) -> dict[str, Any]:
        """Check and time one call; return its row."""
        base = sparse_work.make(case, caches[None])
        works = {name: base.with_cache_of(other) for name, other in caches.items()}
        checks: dict[str | None, check.Check] = {}
        row, floor, calls = self.begin_row(base)
        errors: dict[str, float] = {}
        formats: dict[str, str | None] = {}
        backends = row["backends"] = {}

        def check_of(kv_format: str | None) -> check.Check:
            if kv_format not in checks:
                checks[kv_format] = check.Check.of(works[kv_format].as_decode())
            return checks[kv_format]

        ours: list[contenders.ChainedCalls] = []
        for backend in self.args.backend:
            for name in self.args.kv_format:
                kv_format = None if name == PLAIN else name
                work, is_auto = works[kv_format], backend == "auto"
                label = work.named("jax_mla" if is_auto else f"jax_mla {backend}")
                call = sparse_attention(work.sm_scale, None if is_auto else backend, work.options)
                try:
                    backends[label] = chosen_backend(work) if is_auto else backend
                    checked = check_of(kv_format)
                    out = checked.call(work.call_operands, call)
                    errors[label] = checked.relative_error(out)
                    del out
                    chained = contenders.ChainedCalls(
                        label, call, work.call_operands, caches=work.num_caches, calls=calls
                    )
                except AssertionError as error:
                    row["wrong"][label] = str(error)
                except (ValueError, jax.errors.JaxRuntimeError) as error:
                    row["refused"][label] = str(error)
                else:
                    formats[label] = kv_format
                    ours.append(chained)
        timed: list[timing.Contender] = [*ours]
        for peer in PEERS:
            kv_format = peer.kv_format_of(case)
            if peer.NAME not in self.args.peers:
                continue
            # Without it the caches have not been made: `why_not` has a reason.
            work = works.get(kv_format, dataclasses.replace(base, kv_format=kv_format))
            adapter, reason = adapt(peer, work)
            if adapter is None:
                self.missing.setdefault(peer.NAME, reason)
                continue
            self.peers[peer.NAME] = adapter.description
            try:
                out = adapter.outputs(check_of(kv_format).cache)
                contender = adapter.contender(calls)
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                row["refused"][peer.NAME] = f"{type(error).__name__}: {error}"
                continue
            try:
                errors[peer.NAME] = check_of(kv_format).relative_error(out)
            except AssertionError as error:
                row["wrong"][peer.NAME] = str(error)
                continue
            formats[peer.NAME] = kv_format
            timed.append(contender)
        self._time(row, case, timed, floor, formats, errors)
        self.add_traces(row, ours)
        return row

    def _time(self, row, case, timed, floor, formats, errors) -> None:
        for contender, sample in zip(timed, self.time(timed, floor), strict=True):
            stored = case.stored_as(formats[contender.name])
            least = roofline.floor_seconds(stored, self.ceilings)
            row["times"][contender.name] = call_bench.timed_entry(contender, sample) | {
                "kv_format": stored.kv_format,
                "floor_us": least * 1e6,
                "over_floor": sample.seconds / least,
                "tb_per_s": roofline.num_bytes(stored) / sample.seconds / 1e12,
                "tflop_per_s": row["flops"] / sample.seconds / 1e12,
                "compile_s": getattr(contender, "compile_seconds", None),
                "relative_error": errors[contender.name],
            }


def print_row(table: report.Table, row: dict[str, Any]) -> None:
    """Print a line for every contender of a row, and what it lacks."""
    for name, entry in row["times"].items():
        ours = name.startswith("jax_mla")
        table.row([
            row["case"], name, entry["us"], entry.get("kernels_us"), entry["floor_us"],
            entry["over_floor"], entry["tb_per_s"], entry["tflop_per_s"], entry["spread"],
            entry["relative_error"], bars.best_peer_over_ours(row, name) if ours else None,
            row["backends"].get(name),
        ])  # fmt: skip
    call_bench.print_lacking(row)


def run_grid(bench: Bench, begin: float, output: report.Report) -> decode_rows.Results:
    """Time the calls, print each row as it comes and keep the JSON file up to date."""
    args, results = bench.args, decode_rows.Results()
    table = report.Table(COLUMNS)
    for group in sparse_grid.by_pool(args.cases):
        caches = None
        for case in group:
            if args.budget_s and time.perf_counter() - begin > args.budget_s:
                results.left_out.append(case.label)
                continue
            try:
                if caches is None:
                    caches = bench.make_caches(case)
                row = bench.run_case(case, caches)
            except jax.errors.JaxRuntimeError as error:  # most likely out of memory
                results.failed[case.label] = str(error)
                print(f"# {case.label} FAILED: {error}")
                continue
            results.rows[case] = row
            print_row(table, row)
            output.save(**results.as_json(args.cases), peers=bench.peers, missing=bench.missing)
    return results


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the process's exit status."""
    args = parse_arguments(argv)
    begin = time.perf_counter()
    bench = Bench(args)
    output = report.Report(args.json, bench.device, bench.ceilings)
    results = run_grid(bench, begin, output)
    bench.print_peers(results.left_out)
    summary = decode_rows.summarize(results.rows)
    decode_rows.print_summary(summary)
    on_h200 = "H200" in bench.device.device_kind
    ours = "jax_mla" if "auto" in args.backend else f"jax_mla {args.backend[0]}"
    reached = bars.reached_sparse(results.rows, ours, on_h200=on_h200)
    if reached:
        decode_rows.print_bars(reached)
    print(f"# {time.perf_counter() - begin:.0f} s in all")
    output.save(
        **results.as_json(args.cases),
        peers=bench.peers,
        missing=bench.missing,
        summary=summary,
        bars=[dataclasses.asdict(bar) for bar in reached],
    )
    wrong = any(row["wrong"] for row in results.rows.values())
    return 1 if wrong or results.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

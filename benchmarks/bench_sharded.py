"""Strong scaling of sharded decode over the GPUs of one host.

    python benchmarks/bench_sharded.py          # on 1, 2, 4, ... GPUs of this host
    python benchmarks/bench_sharded.py --cpu-devices 4 --tokens 8192 --batch 4 --seq 512 --heads 16

Ways to split a call over n devices. Each is checked against one device before it is timed:
  cp       one long sequence, its pages over the devices (merged by two reductions)
  cp-sync  the same, XLA's reductions in the stream of the kernels (docs/sharding.md, "On GPUs")
  tp       a batch, heads over the devices, the cache on every device (no communication)
  tp+cp    the same batch, heads and pages over the same devices (q is gathered, never the cache)
benchmarks/README.md explains the figures.
"""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import contenders
import jax
import numpy as np
import report
import timing
import workload
from grid import SM_SCALE, Case
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded_work import AXIS, Operands, Sharding, local_part, place

WAYS = ("cp", "cp-sync", "tp", "tp+cp")
# Between one device and several, both in 16 bits: two roundings of the output, and another order of
# merging.
MOST_RELATIVE_ERROR = 1e-2

CONTEXT = Sharding("cp", None, AXIS)
CONTEXT_SYNC = Sharding(
    "cp-sync", None, AXIS, {"xla_disable_hlo_passes": "async-collective-creator"}
)
HEADS = Sharding("tp", AXIS, None)
BOTH = Sharding("tp+cp", AXIS, AXIS)
# Kernels that communicate: NCCL's, and XLA's own, which are named after the operation.
COLLECTIVE_KERNEL = re.compile(r"nccl|^(psum|pmax|all[-_]|reduce[-_]scatter)", re.IGNORECASE)


def chained(
    sharding: Sharding, name: str, decode: contenders.DecodeFn, ops: Operands, calls: int,
    queries: NamedSharding,
) -> contenders.ChainedCalls:  # fmt: skip
    """Calls over the rotating caches of a mesh; `queries` is the sharding of q, in and out."""
    return contenders.ChainedCalls(
        name, decode, ops.with_queries_as(queries), caches=ops.num_caches, calls=calls,
        out_sharding=queries, compiler_options=sharding.compiler_options,
    )  # fmt: skip


def one_call(decode: contenders.DecodeFn, ops: Operands, sharding: NamedSharding) -> np.ndarray:
    """The result of a single call over the first cache, gathered on the host, float32."""
    out = jax.jit(decode, static_argnums=5)(*ops.with_queries_as(sharding), 0)
    return np.asarray(out).astype(np.float32)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want| in the Euclidean norm."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def collective_seconds(spans: Sequence[timing.Span]) -> float:
    """Time in which only kernels that communicate run, their waiting for other devices included.

    XLA launches its kernels early, so they wait beside the kernel before them. The first one of all
    also waits until all devices have begun, and is left out.
    """
    talking = sorted(s for s in spans if COLLECTIVE_KERNEL.search(s[2]))[1:]
    others = [s for s in spans if not COLLECTIVE_KERNEL.search(s[2])]
    union, rest = (timing.summarize_spans(group) for group in ([*talking, *others], others))
    return union.busy_seconds - rest.busy_seconds if union and rest else 0.0


def collectives_us(contender: timing.Contender) -> float | None:
    """`collective_seconds` of one call on device 0, in us; None where nothing can be traced."""
    spans = timing.trace_spans(lambda: contender.run(1))
    return collective_seconds(spans) / contender.calls * 1e6 if spans else None


def run(case: Case, sharding: Sharding, counts: list[int], args: argparse.Namespace) -> list[dict]:
    """Check and time one way of sharing on each number of devices; return a row for each."""
    rows: list[dict[str, Any]] = []
    first: np.ndarray | None = None
    caches = args.caches or workload.num_caches(case, 4e8 if args.on_gpu else 1e6, most=8)
    calls = timing.calls_per_dispatch(caches, args.estimate_us * 1e-6, min_seconds=10e-3)
    # The call as a user writes it. Only the operands say how it is sharded.
    whole = contenders.jax_mla_decode(SM_SCALE)
    kind = AxisType.Explicit if args.mesh == "explicit" else AxisType.Auto
    for count in counts:
        mesh = jax.make_mesh((count,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:count])
        with jax.set_mesh(mesh):
            ops = place(case, sharding, mesh, caches)
            q_sharding = NamedSharding(mesh, sharding.q)
            result = one_call(whole, ops, q_sharding)
            first = result if first is None else first
            error = relative_error(result, first)
            if not error < MOST_RELATIVE_ERROR:
                raise RuntimeError(
                    f"{sharding.name} on {count} devices differs from one: {error:.2e}"
                )
            full = chained(sharding, sharding.name, whole, ops, calls, q_sharding)
            local_q = NamedSharding(mesh, P() if sharding.pages else sharding.q)
            alone = chained(sharding, "local", local_part(sharding, mesh), ops, calls, local_q)
            single = chained(sharding, "single", whole, ops, 1, q_sharding)
            # Each on its own, as a server runs it. In turn, the one that never pauses for
            # communication would draw more power and lower the clock of the others.
            samples = [
                timing.time_in_turn(
                    [one], repeats=args.repeats, min_dispatches=8 if args.on_gpu else 2
                )[0]
                for one in (full, alone, single)
            ]
            traced = collectives_us(full) if args.on_gpu and not args.no_trace else None
        us, local_us, single_us = (sample.seconds * 1e6 for sample in samples)
        base = rows[0]["us"] if rows else us
        rows.append({
            "sharding": sharding.name, "case": case.label, "devices": count, "us": us,
            "calls": calls, "single_us": single_us, "local_us": local_us,
            "communication_us": us - local_us, "collectives_us": traced,
            "speedup": base / us, "efficiency": base / us / count,
            "host_us_a_call": samples[0].host_seconds / calls * 1e6,
            "spread": samples[0].spread, "relative_error": error,
        })  # fmt: skip
        del ops, full, alone, single
    return rows


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line and start the devices that it asks for."""
    parser = report.argument_parser(__doc__, repeats=7)
    parser.add_argument("--devices", type=int, nargs="+", help="device counts (1 is always timed)")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--mesh", choices=("auto", "explicit"), default="auto", help="kind of axis")
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2**20, help="length of the one sequence (cp)")
    parser.add_argument("--batch", type=int, default=128, help="batch (tp)")
    parser.add_argument("--seq", type=int, default=8192, help="tokens of each sequence (tp)")
    parser.add_argument("--caches", type=int, help="rotating caches (default: 400 MB, at least 2)")
    parser.add_argument("--estimate-us", type=float, default=200.0, help="expected time of a call")
    parser.add_argument("--cpu-devices", type=int, help="dry run on this many virtual CPU devices")
    args = parser.parse_args(argv)
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
    args.on_gpu = jax.devices()[0].platform in ("gpu", "cuda")
    available = jax.device_count()
    counts = args.devices or [2**i for i in range(1, available.bit_length()) if 2**i <= available]
    args.counts = sorted({1, *counts})
    if args.counts[-1] > available:
        parser.error(f"--devices asks for {args.counts[-1]}, this host has {available}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the process's exit status."""
    args = parse_arguments(argv)
    output = report.Report(args.json, jax.devices()[0])
    table = report.Table([
        ("case", "s"), ("sharing", "s"), ("devices", "d"), ("us", ".1f"), ("single us", ".1f"),
        ("local us", ".1f"), ("comm. us", ".1f"), ("kernels us", ".1f"), ("speed-up", ".2f"),
        ("efficiency", ".0%"), ("host us", ".1f"), ("rel. error", ".1e"),
    ])  # fmt: skip
    long = Case(batch=1, num_heads=args.heads, seq=args.tokens)
    wide = Case(batch=args.batch, num_heads=args.heads, seq=args.seq)
    rows: list[dict] = []
    for case, sharding in ((long, CONTEXT), (long, CONTEXT_SYNC), (wide, HEADS), (wide, BOTH)):
        if sharding.name not in args.only:
            continue
        for row in run(case, sharding, args.counts, args):
            rows.append(row)
            table.row([
                row["case"], row["sharding"], row["devices"], row["us"], row["single_us"],
                row["local_us"], row["communication_us"], row["collectives_us"], row["speedup"],
                row["efficiency"], row["host_us_a_call"], row["relative_error"],
            ])  # fmt: skip
            output.save(rows=rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

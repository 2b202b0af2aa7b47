"""Host time of a decode step: the attention of each of 61 layers in one jitted function.

    python benchmarks/bench_host.py

It also counts how often the handlers are called in the steady state, which is never on a GPU, where
XLA replays its command buffers; and it times single small calls, jitted and eager.
benchmarks/README.md says how to read the figures.
"""

import argparse
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
import timing
from grid import SM_SCALE
from workload import KV_SCALE


class Step:
    """A jitted decode step without the model: new rows and attention in each layer of a pool."""

    name = "step"

    def __init__(self, args: argparse.Namespace) -> None:
        """Make the operands, compile and warm up."""
        import jax_mla

        self.calls = 1
        layers, batch, heads = args.layers, args.batch, args.heads
        dtype = jnp.bfloat16
        pages = -(-args.seq // 64)
        rng = np.random.default_rng(0)
        keys = jax.random.split(jax.random.key(0), 4)
        self._pool = jax.random.normal(keys[0], (layers, batch * pages, 64, 576), dtype)
        cache: dict[str, Any] = {}
        if args.kv_format:
            scale = KV_SCALE if args.kv_format == "fp8_e4m3" else None
            cache = {"kv_format": args.kv_format, "kv_scale": scale}

            @jax.jit
            def encode(pool: jax.Array) -> jax.Array:
                rows = pool[..., :512], pool[..., 512:]
                types = [jnp.float8_e4m3fn]
                return jax_mla.reference.encode_rows(*rows, args.kv_format, scale, types)[0]

            self._pool = encode(self._pool)
        self._q = jax.random.normal(keys[1], (batch, heads, 512), dtype)
        self._fixed = (
            jax.random.normal(keys[2], (batch, heads, 64), dtype),
            jax.random.normal(keys[3], (batch, 576), dtype),
            jnp.asarray(rng.permutation(batch * pages).astype(np.int32).reshape(batch, pages)),
            jnp.full((batch,), args.seq, jnp.int32),
            jnp.arange(batch + 1, dtype=jnp.int32),
        )
        how = {"sm_scale": SM_SCALE, "backend": args.backend} | cache
        raw: dict[str, Any] = {}
        if args.raw:
            raw = {
                "norm_weight": jnp.ones(512, jnp.float32),
                "rope_table": jax_mla.rope_table(args.seq, 64),
                "rope_interleaved": True,
            }

        def layer_step(carry, layer, q_pe, row, table, lens, cu_q_lens):
            q, pool = carry
            ckv, kpe = row[:, :512], row[:, 512:]
            if args.op == "append_decode":
                pool = jax_mla.append(pool, ckv, kpe, table, lens - 1, layer=layer, **cache)
                return jax_mla.decode(q, q_pe, pool, table, lens, layer=layer, **how), pool
            bounds = cu_q_lens if args.op == "ragged" else None
            return jax_mla.ragged_paged_attention(
                q, q_pe, ckv, kpe, pool, table, lens, bounds, layer=layer, **how, **raw
            )

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(q, pool, *fixed):
            if args.loop == "scan":
                body = lambda carry, layer: (layer_step(carry, layer, *fixed), None)  # noqa: E731
                return jax.lax.scan(body, (q, pool), jnp.arange(layers, dtype=jnp.int32))[0]
            for layer in range(layers):
                q, pool = layer_step((q, pool), layer, *fixed)
            return q, pool

        self._step = step
        start = time.perf_counter()
        self.run(1)
        self.compile_seconds = time.perf_counter() - start
        self.run(3)

    def run(self, dispatches: int) -> float:
        """Enqueue steps and wait for the last; return the seconds until the host was free."""
        q, pool = self._q, self._pool
        start = time.perf_counter()
        for _ in range(dispatches):
            q, pool = self._step(q, pool, *self._fixed)
        host = time.perf_counter() - start
        self._q, self._pool = jax.block_until_ready((q, pool))
        return host


def call_times(repeats: int) -> dict[str, float]:
    """Time single calls, jitted and eager, on arrays so small that the host's share dominates.

    Args:
      repeats: how often 200 calls are timed; the fastest counts.

    Returns:
      Microseconds a call, by figure.
    """
    import jax_mla

    ones = functools.partial(jnp.ones, dtype=jnp.bfloat16)  # dims and dtype that GPUs take
    q_nope, q_pe, pool = ones((1, 1, 512)), ones((1, 1, 64)), ones((2, 1, 1, 576))
    ckv, kpe = ones((1, 512)), ones((1, 64))
    table, zero, one = (jnp.full(shape, n, jnp.int32) for shape, n in (((1, 1), 0), (1, 0), (1, 1)))

    def decode() -> jax.Array:
        return jax_mla.decode(q_nope, q_pe, pool, table, one, sm_scale=1.0, layer=1)

    def append() -> jax.Array:
        return jax_mla.append(pool, ckv, kpe, table, zero, layer=1)

    decode_arrays = (q_nope, q_pe, pool, table, one)
    jitted_decode = jax.jit(lambda *xs: jax_mla.decode(*xs, sm_scale=1.0, layer=1))
    jitted_append = jax.jit(lambda *xs: jax_mla.append(*xs, layer=1))
    calls = {
        "jitted_decode_us": lambda: jitted_decode(*decode_arrays),
        "eager_decode_us": decode,
        "jitted_append_us": lambda: jitted_append(pool, ckv, kpe, table, zero),
        "eager_append_us": append,
    }
    times = dict.fromkeys(calls, float("inf"))
    jax.block_until_ready([call() for call in calls.values()])
    for _ in range(repeats):  # in turn, so that what slows the machine slows all of them
        for name, call in calls.items():
            start = time.perf_counter()
            results = [call() for _ in range(200)]
            jax.block_until_ready(results)
            times[name] = min(times[name], (time.perf_counter() - start) / 200 * 1e6)
    return times


def handler_calls() -> dict[str, int]:
    """Return how often each of our handlers has run in this process."""
    from jax_mla._runtime import _ffi

    return dict(_ffi.extension().call_counts())


def measure(step: Step, args: argparse.Namespace, *, on_gpu: bool) -> dict[str, Any]:
    """Time the step and count handler calls; return the figures."""
    before = handler_calls()
    step.run(args.steps)
    after = handler_calls()
    alone = []
    for _ in range(args.repeats):  # one step at a time, so that the host never runs ahead
        start = time.perf_counter()
        host = step.run(1)
        alone.append((host, time.perf_counter() - start))
    sample = timing.time_in_turn([step], repeats=args.repeats, min_seconds=0.05, min_dispatches=4)[
        0
    ]
    kernels = timing.trace_kernels(lambda: step.run(1)) if on_gpu and not args.no_trace else None
    to_us = 1e6
    result: dict[str, Any] = {
        "layers": args.layers,
        "compile_s": step.compile_seconds,
        "enqueue_one_step_us": statistics.median(host for host, _ in alone) * to_us,
        "one_step_alone_us": statistics.median(total for _, total in alone) * to_us,
        "pipelined_step_us": sample.seconds * to_us,
        "pipelined_layer_us": sample.seconds / args.layers * to_us,
        "host_share_of_pipelined_step_us": sample.host_seconds * to_us,
        "handler_calls_a_step": {
            name: (count - before.get(name, 0)) / args.steps for name, count in after.items()
        },
    }
    result |= call_times(args.repeats)
    if kernels:
        busy = kernels.busy_seconds
        result["kernels_step_us"] = busy * to_us
        result["over_kernels_a_layer_us"] = (sample.seconds - busy) / args.layers * to_us
        result["kernels"] = {
            name: {"count": count, "us": seconds / count * to_us}
            for name, (count, seconds) in kernels.kernels.items()
        }
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the process's exit status."""
    parser = report.argument_parser(__doc__, repeats=9)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument(
        "--loop",
        choices=("unrolled", "scan"),
        help="over the layers (GPU unrolled; CPU scan, since XLA copies the pool there between "
        "unrolled layers whose new rows do not depend on the layer before, as they do in a model)",
    )
    parser.add_argument(
        "--op",
        choices=("append_decode", "uniform", "ragged"),
        default="append_decode",
        help="append and decode, or ragged_paged_attention without or with cu_q_lens",
    )
    parser.add_argument(
        "--raw",
        action="store_true",
        help="with --op uniform and ragged: rows are normalised and rotated, queries rotated",
    )
    parser.add_argument(
        "--kv-format", choices=("fp8_e4m3", "fp8_ds_mla"), help="of the cache (default: bfloat16)"
    )
    parser.add_argument("--backend", help="backend of decode (default: the first that can)")
    parser.add_argument("--steps", type=int, default=20, help="steps over which calls are counted")
    args = parser.parse_args(argv)
    if args.raw and args.op == "append_decode":
        parser.error("--raw: expected --op uniform or ragged, got append_decode")
    device = jax.devices()[0]
    on_gpu = device.platform != "cpu"
    args.loop = args.loop or ("unrolled" if on_gpu else "scan")
    output = report.Report(args.json, device)
    result = measure(Step(args), args, on_gpu=on_gpu)
    for key, value in result.items():
        if key != "kernels":
            print(f"{key}: {value:.2f}" if isinstance(value, float) else f"{key}: {value}")
    for name, figures in result.get("kernels", {}).items():
        print(f"  {figures['count']:4d} x {figures['us']:8.2f} us  {name[:100]}")
    output.save(result=result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

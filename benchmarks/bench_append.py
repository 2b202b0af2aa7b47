"""Time `jax_mla.append`: 8192 tokens of prefill and the sizes of a decode step.

    python benchmarks/bench_append.py

Times one jitted function of many appends to the layers of a stacked, donated pool, in turn with
XLA's own scatter. benchmarks/README.md explains the figures.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
import roofline
import timing

# append(pool, ckv, kpe, page_table, positions, layer) -> pool
AppendFn = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class AppendCase:
    """`q_len` new tokens for each of `batch` sequences that then hold `seq` tokens."""

    batch: int
    q_len: int
    seq: int
    page_size: int = 64
    dtype: str = "bfloat16"
    d_ckv: int = 512
    d_kpe: int = 64

    @property
    def label(self) -> str:
        """Short name for the report."""
        return f"b{self.batch} q{self.q_len} s{self.seq} p{self.page_size}"

    @property
    def num_bytes(self) -> int:
        """Bytes of one call: each new row is read once and written once."""
        row = (self.d_ckv + self.d_kpe) * jnp.dtype(self.dtype).itemsize
        return 2 * self.batch * self.q_len * row


def operands(case: AppendCase, layers: int) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return a zeroed stacked pool, and (ckv, kpe, page_table, positions) of the new tokens."""
    rng = np.random.default_rng(0)
    pages = -(-case.seq // case.page_size)
    table = rng.permutation(case.batch * pages).astype(np.int32).reshape(case.batch, pages)
    positions = np.broadcast_to(
        np.arange(case.seq - case.q_len, case.seq, dtype=np.int32), (case.batch, case.q_len)
    )
    dtype = jnp.dtype(case.dtype)
    rows = (case.batch, case.q_len)
    ckv = rng.standard_normal((*rows, case.d_ckv), np.float32).astype(dtype)
    kpe = rng.standard_normal((*rows, case.d_kpe), np.float32).astype(dtype)
    shape = (layers, case.batch * pages, case.page_size, case.d_ckv + case.d_kpe)
    return jnp.zeros(shape, dtype), tuple(map(jnp.asarray, (ckv, kpe, table, positions)))


def ours(pool, ckv, kpe, page_table, positions, layer) -> jax.Array:
    """`jax_mla.append`."""
    import jax_mla

    pool = jax_mla.append(pool, ckv, kpe, page_table, positions, layer=layer)
    assert isinstance(pool, jax.Array)
    return pool


def scatter(pool, ckv, kpe, page_table, positions, layer) -> jax.Array:
    """XLA's scatter, as a JAX user would write it."""
    page_size = pool.shape[2]
    page = jnp.take_along_axis(page_table, positions // page_size, axis=1)
    rows = jnp.concatenate([ckv, kpe], axis=-1)
    return pool.at[layer, page, positions % page_size].set(rows, mode="drop")


class ChainedAppend:
    """A jitted function that appends to every layer of a donated pool."""

    def __init__(
        self, name: str, append: AppendFn, case: AppendCase, *, layers: int, calls: int
    ) -> None:
        """Compile and warm up."""
        self.name = name
        self.calls = calls
        self._pool, self._new = operands(case, layers)

        @functools.partial(jax.jit, donate_argnums=0)
        def step(pool, *new):
            for i in range(calls):
                pool = append(pool, *new, i % layers)
            return pool

        self._step = step
        self.run(3)

    def run(self, dispatches: int) -> float:
        """Enqueue that many dispatches, wait for the last; return the host's share in seconds."""
        pool = self._pool
        start = time.perf_counter()
        for _ in range(dispatches):
            pool = self._step(pool, *self._new)
        host = time.perf_counter() - start
        self._pool = pool.block_until_ready()
        return host


def check(append: AppendFn, case: AppendCase) -> None:
    """Append once to a one-layer pool and compare every row with a scatter on the host.

    Raises:
      RuntimeError: A row differs.
    """
    pool, new = operands(case, 1)
    result = np.asarray(jax.jit(append, static_argnums=5, donate_argnums=0)(pool, *new, 0))[0]
    ckv, kpe, table, positions = map(np.asarray, new)
    expected = np.zeros_like(result)
    page = np.take_along_axis(table, positions // case.page_size, axis=1)
    expected[page, positions % case.page_size] = np.concatenate([ckv, kpe], axis=-1)
    if not np.array_equal(result.view(np.uint8), expected.view(np.uint8)):
        raise RuntimeError(f"{case.label}: append wrote something else than a scatter does")


def run_case(
    case: AppendCase, *, layers: int, repeats: int, on_gpu: bool, trace: bool
) -> dict[str, Any]:
    """Check and time one case; return its row."""
    functions = {"jax_mla": ours, "xla scatter": scatter}
    for append in functions.values():
        check(append, case)
    # Small appends take about 2 us each. On a GPU a dispatch must take longer than the host's work.
    calls = 4 * layers if on_gpu and case.batch * case.q_len < 1024 else layers
    chained = [
        ChainedAppend(name, append, case, layers=layers, calls=count)
        for count in (calls, calls // 2)
        for name, append in functions.items()
    ]
    samples = timing.time_in_turn(chained, repeats=repeats, min_dispatches=8 if on_gpu else 1)
    all_of, half_samples = chained[: len(functions)], samples[len(functions) :]
    times = {}
    for contender, sample, half in zip(all_of, samples, half_samples, strict=False):
        kernels = timing.trace_kernels(lambda c=contender: c.run(1)) if trace else None
        times[contender.name] = {
            "us": sample.seconds * 1e6,
            "kernels_us": kernels.busy_seconds / calls * 1e6 if kernels else None,
            "gb_per_s": case.num_bytes / sample.seconds / 1e9,
            "doubling": half.seconds / sample.seconds - 1,
            "spread": sample.spread,
        }
    return {"case": case.label, "bytes": case.num_bytes, "calls": calls, "times": times}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the process's exit status."""
    parser = report.argument_parser(__doc__, repeats=7)
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8, 32, 128], help="decode sizes"
    )
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the prefill rows")
    parser.add_argument("--seq", type=int, default=1024, help="tokens after a decode step")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--layers", type=int, help="layers of the stacked pool (GPU 60, CPU 4)")
    args = parser.parse_args(argv)
    device = jax.devices()[0]
    on_gpu = device.platform != "cpu"
    output = report.Report(args.json, device, roofline.KNOWN_DEVICES.get(device.device_kind))
    sizes = [(1, args.prefill, args.prefill), (8, args.prefill // 8, args.prefill // 8)]
    sizes += [(batch, 1, args.seq) for batch in args.batch]
    table = report.Table([
        ("case", "s"), ("implementation", "s"), ("us", ".2f"), ("kernels us", ".2f"),
        ("GB/s", ".0f"), ("doubling", "+.1%"), ("spread", ".1%"),
    ])  # fmt: skip
    rows = []
    for batch, q_len, seq in sizes:
        case = AppendCase(batch, q_len, seq, args.page_size, args.dtype)
        # On a CPU, XLA's scatter copies the pool, so the pool is small there.
        layers = args.layers or (60 if on_gpu else 4)
        trace = on_gpu and not args.no_trace
        row = run_case(case, layers=layers, repeats=args.repeats, on_gpu=on_gpu, trace=trace)
        rows.append(row)
        for name, entry in row["times"].items():
            table.row([
                row["case"], name, entry["us"], entry["kernels_us"], entry["gb_per_s"],
                entry["doubling"], entry["spread"],
            ])  # fmt: skip
        output.save(rows=rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Time `jax_mla.append`: 8192 tokens of prefill and the sizes of a decode step, FP8, raw rows.

    python benchmarks/bench_append.py

Times one jitted function of many appends to the layers of a stacked, donated pool, in turn with
XLA's own scatter where the rows are written as they are. benchmarks/README.md explains the figures.
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

# append(case, pool, new, layer) -> pool; `new` are the arguments of `jax_mla.append`, by name
AppendFn = Callable[..., jax.Array]
KV_SCALE = (0.02, 0.03)


@dataclasses.dataclass(frozen=True)
class AppendCase:
    """`q_len` new tokens for each of `batch` sequences that then hold `seq` tokens.

    Attributes:
      kv_format: format of the cache; None for `dtype`.
      is_raw: whether ckv is normalised and kpe rotated.
      num_heads: heads of q_pe, which is rotated as well; 0 for none.
    """

    batch: int
    q_len: int
    seq: int
    page_size: int = 64
    dtype: str = "bfloat16"
    d_ckv: int = 512
    d_kpe: int = 64
    kv_format: str | None = None
    is_raw: bool = False
    num_heads: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether the rows are written as they are."""
        return self.kv_format is None and not self.is_raw

    @property
    def label(self) -> str:
        """Short name for the report."""
        parts = [f"b{self.batch} q{self.q_len} s{self.seq} p{self.page_size}"]
        parts.append((self.kv_format or "").removeprefix("fp8_"))
        parts += ["raw" if self.is_raw else "", f"h{self.num_heads}" if self.num_heads else ""]
        return " ".join(part for part in parts if part)

    @property
    def pool_row(self) -> tuple[int, str]:
        """Elements of a row of the pool, and their dtype."""
        if self.kv_format == "fp8_ds_mla":
            return 656, "uint8"
        width = self.d_ckv + self.d_kpe
        return width, self.dtype if self.kv_format is None else "float8_e4m3fn"

    @property
    def num_bytes(self) -> int:
        """Bytes of one call: each new row and query is read once and written once."""
        itemsize = jnp.dtype(self.dtype).itemsize
        width, stored = self.pool_row
        row = (self.d_ckv + self.d_kpe) * itemsize + width * jnp.dtype(stored).itemsize
        return self.batch * self.q_len * (row + 2 * self.num_heads * self.d_kpe * itemsize)

    def options(self) -> dict[str, Any]:
        """Return the static arguments of `jax_mla.append`."""
        rotation = {"rope_interleaved": True} if self.is_raw else {}
        if self.kv_format is None:
            return rotation
        scale = {"kv_scale": KV_SCALE} if self.kv_format == "fp8_e4m3" else {}
        return {"kv_format": self.kv_format, **scale, **rotation}


def operands(case: AppendCase, layers: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return a zeroed stacked pool, and the arrays that `jax_mla.append` gets besides."""
    import jax_mla

    rng = np.random.default_rng(0)
    pages = -(-case.seq // case.page_size)
    table = rng.permutation(case.batch * pages).astype(np.int32).reshape(case.batch, pages)
    positions = np.broadcast_to(
        np.arange(case.seq - case.q_len, case.seq, dtype=np.int32), (case.batch, case.q_len)
    )
    dtype = jnp.dtype(case.dtype)
    rows = (case.batch, case.q_len)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    new: dict[str, Any] = {"ckv": normal(*rows, case.d_ckv), "kpe": normal(*rows, case.d_kpe)}
    new |= {"page_table": table, "positions": positions}
    if case.is_raw:
        new["norm_weight"] = np.ones(case.d_ckv, np.float32)
        new["rope_table"] = jax_mla.rope_table(case.seq, case.d_kpe)
    if case.num_heads:
        new["q_pe"] = normal(*rows, case.num_heads, case.d_kpe)
    width, stored = case.pool_row
    shape = (layers, case.batch * pages, case.page_size, width)
    return jnp.zeros(shape, stored), {name: jnp.asarray(x) for name, x in new.items()}


def ours(case, pool, new, layer, backend=None) -> jax.Array:
    """`jax_mla.append`."""
    import jax_mla

    result: Any = jax_mla.append(pool, **new, layer=layer, backend=backend, **case.options())
    return result[1] if case.num_heads else result


def scatter(case, pool, new, layer) -> jax.Array:
    """XLA's scatter, as a JAX user would write it."""
    ckv, kpe, page_table, positions = new.values()
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
        def step(pool, new):
            for i in range(calls):
                pool = append(case, pool, new, i % layers)
            return pool

        self._step = step
        self.run(3)

    def run(self, dispatches: int) -> float:
        """Enqueue that many dispatches, wait for the last; return the host's share in seconds."""
        pool = self._pool
        start = time.perf_counter()
        for _ in range(dispatches):
            pool = self._step(pool, self._new)
        host = time.perf_counter() - start
        self._pool = pool.block_until_ready()
        return host


def check(append: AppendFn, case: AppendCase) -> None:
    """Append once to a one-layer pool and compare every row.

    Rows that are written as they are must be those of a scatter on the host. The others are
    compared with the definition: a hundredth of the bytes may differ where values are computed.

    Raises:
      RuntimeError: A row differs.
    """

    def first_layer(fun: AppendFn) -> np.ndarray:
        pool, new = operands(case, 1)
        run = jax.jit(functools.partial(fun, case), static_argnums=2, donate_argnums=0)
        return np.asarray(run(pool, new, 0))[0]

    result = first_layer(append)
    if case.is_plain:
        new = {name: np.asarray(x) for name, x in operands(case, 1)[1].items()}
        expected = np.zeros_like(result)
        page = np.take_along_axis(new["page_table"], new["positions"] // case.page_size, axis=1)
        rows = np.concatenate([new["ckv"], new["kpe"]], axis=-1)
        expected[page, new["positions"] % case.page_size] = rows
    else:
        expected = first_layer(functools.partial(ours, backend="reference"))
    differs = (result.view(np.uint8) != expected.view(np.uint8)).mean()
    if differs > (0.01 if case.is_raw else 0):
        raise RuntimeError(f"{case.label}: append wrote something else than its definition")


def run_case(
    case: AppendCase, *, layers: int, repeats: int, on_gpu: bool, trace: bool
) -> dict[str, Any]:
    """Check and time one case; return its row."""
    functions: dict[str, AppendFn] = {"jax_mla": ours}
    if case.is_plain:
        functions["xla scatter"] = scatter
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
    cases = [AppendCase(*size, args.page_size, args.dtype) for size in sizes]
    encoded = [
        {"kv_format": "fp8_e4m3"},
        {"kv_format": "fp8_ds_mla"},
        {"is_raw": True},
        {"is_raw": True, "kv_format": "fp8_e4m3"},
        {"is_raw": True, "kv_format": "fp8_ds_mla"},
        {"is_raw": True, "kv_format": "fp8_e4m3", "num_heads": 16},
    ]
    # Of the largest decode step and of the prefill, which is of one sequence.
    cases += [
        dataclasses.replace(case, **changes)
        for case in (cases[-1], cases[0])
        for changes in encoded
    ]
    table = report.Table([
        ("case".ljust(32), "s"), ("implementation", "s"), ("us", ".2f"), ("kernels us", ".2f"),
        ("GB/s", ".0f"), ("doubling", "+.1%"), ("spread", ".1%"),
    ])  # fmt: skip
    rows = []
    for case in cases:
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

"""Time `jax_mla.prefill` on long prompts, beside cuDNN's attention alone and absorbed attention.

    python benchmarks/bench_prefill.py

What is timed, in turn:

* `jax_mla`: `prefill`, from the latents and the cache to the values of each head;
* `cudnn alone`: cuDNN's attention on keys and values that are there already, without lengths. It
  knows neither pages nor prompts of several lengths, so where a case has several it is left out;
* `up`: the up-projections alone, which `jax_mla` contains and cuDNN does not;
* `absorbed`: `ragged_paged_attention` between the two products with W_UK and W_UV;
* `mixed`: `mixed_attention`, which writes the new rows and then does either;
* other implementations of `prefill`, with --implementation.

With --decoding the step has sequences beside the prompts that decode, behind 4096 tokens each. Then
`mixed` stands in the place of `jax_mla`, and only `absorbed` is beside it.

TFLOP/s count the products of queries and keys, and of weights and values, of the pairs that are
seen, as if every contender computed them unabsorbed. So rates compare as times do. `up` has none.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import report
import timing

import jax_mla

PAGE_SIZE = 64
DTYPE = jnp.bfloat16
MIN_DISPATCH_SECONDS = 1e-3
DECODING_TOKENS = 4096  # in the cache, of a sequence that decodes

Arrays = dict[str, jax.Array]


class Dims(NamedTuple):
    """Sizes of a model."""

    d_nope: int
    d_kpe: int
    d_ckv: int
    d_v: int

    @property
    def sm_scale(self) -> float:
        """Factor on the scores."""
        return (self.d_nope + self.d_kpe) ** -0.5


MODELS = {
    "deepseek": Dims(128, 64, 512, 128),
    "glm": Dims(192, 64, 512, 256),
    "mistral": Dims(64, 64, 256, 128),
    "minicpm3": Dims(64, 32, 256, 64),
}


@dataclasses.dataclass(frozen=True)
class PrefillCase:
    """Prompts with these numbers of new tokens, each behind `prefix` cached ones.

    Behind them, `decoding` sequences have one new token each.
    """

    dims: Dims
    num_heads: int
    q_lens: tuple[int, ...]
    prefix: int
    decoding: int = 0

    @property
    def label(self) -> str:
        """Short name for the report."""
        lengths = "+".join(map(str, self.q_lens))
        beside = f", {self.decoding} decode" if self.decoding else ""
        return f"h{self.num_heads} {lengths} behind {self.prefix}{beside}"

    @property
    def seqs(self) -> list[tuple[int, int]]:
        """New and cached tokens of each sequence."""
        return [(q, self.prefix) for q in self.q_lens] + self.decoding * [(1, DECODING_TOKENS)]

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head."""
        return sum(q * (q + 1) // 2 + q * prefix for q, prefix in self.seqs)

    @property
    def num_flops(self) -> int:
        """Unabsorbed attention, without the up-projections."""
        width = self.dims.d_nope + self.dims.d_kpe + self.dims.d_v
        return 2 * self.num_heads * self.num_pairs * width


@functools.partial(jax.jit, static_argnums=0)
def make_arrays(case: PrefillCase, seed: int) -> Arrays:
    """Return the operands of all contenders."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return (scale * jax.random.normal(next(keys), shape, jnp.float32)).astype(DTYPE)

    d_nope, d_kpe, d_ckv, d_v = case.dims
    q_lens, lens = zip(*((q, q + prefix) for q, prefix in case.seqs), strict=True)
    heads, tokens, seqs = case.num_heads, sum(q_lens), len(q_lens)
    pages = -(-max(lens) // PAGE_SIZE)
    table = np.random.default_rng(0).permutation(seqs * pages).astype(np.int32)
    weight = d_ckv**-0.5
    arrays = {
        "q_nope": normal(tokens, heads, d_nope), "q_pe": normal(tokens, heads, d_kpe),
        "ckv": normal(tokens, d_ckv), "kpe": normal(tokens, d_kpe),
        "w_uk": normal(heads, d_nope, d_ckv, scale=weight),
        "w_uv": normal(heads, d_ckv, d_v, scale=weight),
        "kv_pages": normal(seqs * pages, PAGE_SIZE, d_ckv + d_kpe),
        "page_table": jnp.asarray(table.reshape(seqs, pages)),
        "seq_lens": jnp.asarray(lens, jnp.int32),
        "cu_q_lens": jnp.asarray(np.cumsum((0, *q_lens)), jnp.int32),
    }  # fmt: skip
    rows = arrays["kv_pages"][arrays["page_table"][0]].reshape(-1, d_ckv + d_kpe)[: case.prefix]
    arrays["all_ckv"] = jnp.concatenate([rows[:, :d_ckv], arrays["ckv"]])
    k_nope, v = up_project(arrays)
    kpe = jnp.concatenate([rows[:, d_ckv:], arrays["kpe"]])[:, None]
    arrays["q"] = jnp.concatenate([arrays["q_nope"], arrays["q_pe"]], axis=-1)
    arrays["k"] = jnp.concatenate(
        [k_nope, jnp.broadcast_to(kpe, (*k_nope.shape[:2], d_kpe))], axis=-1
    )
    return {**arrays, "v": v}


# ---- Contenders: of the arrays of a call --------------------------------------------------------


def prefill(case: PrefillCase, arrays: Arrays, implementation: str | None = None) -> jax.Array:
    """Run `jax_mla.prefill`."""
    names = ["q_nope", "q_pe", "ckv", "kpe", "w_uk", "w_uv", "cu_q_lens"]
    if case.prefix:
        names += ["kv_pages", "page_table", "seq_lens"]
    given: dict[str, Any] = {name: arrays[name] for name in names}
    return jax_mla.prefill(
        **given,
        sm_scale=case.dims.sm_scale,
        max_q_len=max(case.q_lens),
        implementation=implementation,
    )


def cudnn(case: PrefillCase, arrays: Arrays) -> Any:
    """Attend among the new tokens and to the cached ones; the results are not merged."""
    from jax._src.cudnn import fused_attention_stablehlo as impl

    q, k, v = (arrays[name][None] for name in ("q", "k", "v"))

    def attend(rows: slice, mask: Any) -> Any:
        return impl.dot_product_attention(
            q, k[:, rows], v[:, rows], scale=case.dims.sm_scale, mask_type=mask,
            return_residual=case.prefix > 0,
        )  # fmt: skip

    new = attend(slice(case.prefix, None), impl.MaskType.CAUSAL)
    if not case.prefix:
        return new
    return new, attend(slice(0, case.prefix), impl.MaskType.NO_MASK)


def up_project(arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Make k_nope and v of the cached and the new tokens of the first sequence."""
    ckv = arrays["all_ckv"]
    return (
        jnp.einsum("tc,hnc->thn", ckv, arrays["w_uk"]),
        jnp.einsum("tc,hcv->thv", ckv, arrays["w_uv"]),
    )


def absorbed(case: PrefillCase, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Absorb the weights; return the values and the pool with the new rows."""
    q_nope = jnp.einsum("thn,hnc->thc", arrays["q_nope"], arrays["w_uk"])
    latents, kv_pages = jax_mla.ragged_paged_attention(
        q_nope, arrays["q_pe"], arrays["ckv"], arrays["kpe"], arrays["kv_pages"],
        arrays["page_table"], arrays["seq_lens"], arrays["cu_q_lens"], sm_scale=case.dims.sm_scale,
    )  # fmt: skip
    return jnp.einsum("thc,hcv->thv", latents, arrays["w_uv"]), kv_pages


def mixed(case: PrefillCase, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Run `jax_mla.mixed_attention`; return the values and the pool with the new rows."""
    names = ["q_nope", "q_pe", "ckv", "kpe", "w_uk", "w_uv", "kv_pages", "page_table"]
    given: dict[str, Any] = {name: arrays[name] for name in (*names, "seq_lens", "cu_q_lens")}
    return jax_mla.mixed_attention(**given, sm_scale=case.dims.sm_scale)


class Calls:
    """One jitted function of several calls on different arrays, whose pools are donated."""

    def __init__(
        self, name: str, run: Callable[[Arrays], tuple[Any, jax.Array]], data: list[Arrays]
    ) -> None:
        """Trace the function; `compile` must follow."""
        self.name, self.calls, self._data = name, len(data), data
        self._pools = [jnp.copy(arrays["kv_pages"]) for arrays in data]

        @functools.partial(jax.jit, donate_argnums=0)
        def step(pools, data):
            results = [
                run({**arrays, "kv_pages": pool}) for pool, arrays in zip(pools, data, strict=True)
            ]
            return [result for result, _ in results], [pool for _, pool in results]

        self._lowered = step.lower(self._pools, data)

    def compile(self) -> None:
        """Compile the function. Several threads may compile at once."""
        self._step = self._lowered.compile()

    def run(self, dispatches: int) -> float:
        """Enqueue that many dispatches and wait for all; the host's share is not measured."""
        results = None
        for _ in range(dispatches):
            results, self._pools = self._step(self._pools, self._data)
        jax.block_until_ready(results)
        return 0.0


def check(case: PrefillCase, arrays: Arrays) -> float:
    """Return how far `prefill`, or `mixed`, is from absorbed attention, relative.

    Raises:
      RuntimeError: It is further away than rounding explains.
    """
    run = mixed if case.decoding else prefill
    ours = jax.tree.leaves(jax.jit(functools.partial(run, case))(arrays))[0].astype(jnp.float32)
    other = jax.jit(functools.partial(absorbed, case))(arrays)[0].astype(jnp.float32)
    error = float(jnp.linalg.norm(ours - other) / jnp.linalg.norm(other))
    # On a CPU, XLA sums the products of `absorbed` with W_UK and W_UV in bfloat16.
    if not error < (0.01 if jax.default_backend() == "gpu" else 0.05):
        raise RuntimeError(f"{case.label}: the result is {error:.1e} away from absorbed attention")
    return error


def keeping_the_pool(run: Callable[[Arrays], Any]) -> Callable[[Arrays], tuple[Any, jax.Array]]:
    """Return `run` with the pool, as it is, for a second result."""
    return lambda arrays: (run(arrays), arrays["kv_pages"])


def run_case(case: PrefillCase, args: Any) -> dict[str, Any]:
    """Check and time one case; return its row."""
    flops_per_s = 500e12 if jax.default_backend() == "gpu" else 50e9
    calls = max(1, round(MIN_DISPATCH_SECONDS * flops_per_s / case.num_flops))
    data = [make_arrays(case, seed) for seed in range(calls)]
    error = check(case, data[0])
    contenders: dict[str, Callable[[Arrays], Any]] = {}
    if not case.decoding:
        contenders["jax_mla"] = functools.partial(prefill, case)
        for name in args.implementation:
            contenders[name] = functools.partial(prefill, case, implementation=name)
        if len(case.q_lens) == 1:
            contenders["up"] = up_project
            if jax.default_backend() == "gpu":
                contenders["cudnn alone"] = functools.partial(cudnn, case)
    timed = [Calls(name, keeping_the_pool(run), data) for name, run in contenders.items()]
    for name, writing in (("mixed", mixed), ("absorbed", absorbed)):
        timed.append(Calls(name, functools.partial(writing, case), data))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(Calls.compile, timed))
    for contender in timed:
        contender.run(2)
    turn = timing.turn_seconds(case.num_flops / flops_per_s, on_gpu=True)
    samples = timing.time_in_turn(
        timed, repeats=args.repeats, min_seconds=turn, min_dispatches=args.min_dispatches
    )
    times = {
        contender.name: {
            "us": sample.seconds * 1e6,
            "tflop_per_s": None
            if contender.name == "up"
            else case.num_flops / sample.seconds / 1e12,
            "over_jax_mla": sample.seconds / samples[0].seconds,
            "spread": sample.spread,
        }
        for contender, sample in zip(timed, samples, strict=True)
    }
    return {"case": case.label, "flops": case.num_flops, "error": error, "times": times}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the process's exit status."""
    parser = report.argument_parser(__doc__, repeats=5)
    parser.add_argument("--model", choices=MODELS, default="deepseek", help="whose sizes")
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192], help="of one prompt")
    parser.add_argument("--prefix", type=int, nargs="+", default=[0, 16384], help="cached tokens")
    parser.add_argument("--ragged", type=int, nargs="*", default=[3000, 100, 1500, 700, 2600])
    parser.add_argument("--decoding", type=int, default=0, help="sequences that decode")
    parser.add_argument("--implementation", nargs="*", default=[], help="of prefill, besides None")
    parser.add_argument("--min-dispatches", type=int, default=3)
    args = parser.parse_args(argv)
    output = report.Report(args.json, jax.devices()[0])
    prompts = [(tokens,) for tokens in args.tokens] + ([tuple(args.ragged)] if args.ragged else [])
    table = report.Table([
        ("case".ljust(40), "s"), ("what", "s"), ("us", ".1f"), ("TFLOP/s", ".0f"),
        ("time over jax_mla's", ".2f"), ("spread", ".1%"),
    ])  # fmt: skip
    rows = []
    for heads in args.heads:
        for q_lens in prompts:
            for prefix in args.prefix:
                row = run_case(
                    PrefillCase(MODELS[args.model], heads, q_lens, prefix, args.decoding), args
                )
                rows.append(row)
                for name, entry in row["times"].items():
                    table.row([
                        row["case"], name, entry["us"], entry["tflop_per_s"],
                        entry["over_jax_mla"], entry["spread"],
                    ])  # fmt: skip
                output.save(rows=rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

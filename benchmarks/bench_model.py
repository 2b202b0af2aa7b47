"""Times the steps of a model, examples/deepseek, with random weights of DeepSeek-V2-Lite's shape.

    python benchmarks/bench_model.py
    python benchmarks/bench_model.py --slice v32     # a layer with sparse attention, by part

It needs one GPU with 50 GiB of free memory, 100 GiB for `--slice`. A decode step is what
`Engine.run` takes for it, with the host's work: the median over the steps of a run. Prefill feeds
prompts of 2048 tokens to an empty engine. The weights are drawn on the device, and the cache of a
decode step holds zeros: neither changes the time. benchmarks/README.md says more.
"""

import argparse
import gc
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import slice_work  # noqa: E402

from examples.deepseek.config import Config, parse_config  # noqa: E402
from examples.deepseek.engine import Engine  # noqa: E402
from examples.deepseek.mesh import Placement, parse_mesh  # noqa: E402
from examples.deepseek.options import INDEX_FORMATS  # noqa: E402
from examples.deepseek.scheduler import Request  # noqa: E402
from examples.deepseek.weights import Parameter, parameters  # noqa: E402
from jax_mla._runtime import _ffi  # noqa: E402

V2_LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "topk_method": "greedy",
    "max_position_embeddings": 163840,
}
QUICK = V2_LITE | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
# Two layers. In both models the first layers have no experts but a dense network.
DENSE = {"num_hidden_layers": 2, "vocab_size": 8, "max_position_embeddings": 163840}
SLICES = {
    "v32": DENSE
    | {
        "model_type": "deepseek_v32",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    "glm5": DENSE
    | {
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
}
QUICK_SLICE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 16,
}
PARTS = ("projections", *slice_work.OURS, "output", "feed-forward")


def random_params(config: Config, dtype: Any) -> Any:
    """Draw parameters on the device."""
    numbers = itertools.count()

    def draw(parameter: Parameter) -> jax.Array:
        shape, dtype = parameter.shape, jnp.dtype(parameter.dtype)
        values = _normal(jax.random.key(next(numbers)), shape, dtype.name)
        return values * jnp.asarray(max(shape) ** -0.5 if len(shape) > 1 else 1, dtype)

    return jax.tree.map(draw, parameters(config, dtype))


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))


def make_engine(args: argparse.Namespace, config: Config, params: Any, **sizes: Any) -> Engine:
    """Make an engine on one device."""
    placement = Placement.over(parse_mesh(""))
    return Engine(
        config, params, placement, page_size=64, backend=args.backend, product=args.product, **sizes
    )


def prompts(config: Config, count: int, length: int) -> list[list[int]]:
    """Random prompts."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, config.vocab_size, length).tolist() for _ in range(count)]


def run_decode(engine: Engine, batch: int, length: int, steps: int) -> list[float]:
    """Decode `steps` tokens of `batch` sequences behind `length` cached ones: seconds of each."""
    for tokens in prompts(engine.config, batch, length + steps):
        # As if the prompt had been fed and its first new token had come. Random tokens stand for
        # the model's, so that the sequences do not choose the same experts.
        prompt, script = tokens[:length], tokens[length:]
        engine.add(Request(prompt, steps + 2, [0, *script], ids=[0], fed=length))
    ticks = []
    for _ in engine.run():
        ticks.append(time.perf_counter())
    return list(np.diff(ticks))


def bench_decode(args: argparse.Namespace, config: Config, params: Any, batch: int) -> None:
    """Print a row for decode steps of `batch` sequences."""
    length = args.length if batch < 128 else args.length // 2
    sizes = {"slots": batch, "max_tokens": length + args.steps + 64}
    engine = make_engine(args, config, params, **sizes)
    engine.warm_up(decode_only=True)
    run_decode(engine, batch, length, 8)
    before = _ffi.extension().call_counts()
    seconds = run_decode(engine, batch, length, args.steps)
    after = _ffi.extension().call_counts()
    calls = sum(after.values()) - sum(before.values())
    median, low, compiling = statistics.median(seconds), min(seconds), engine.seconds["compile"]
    print(
        f"| decode, batch {batch} | {1e3 * median:.2f} ms | {1e3 * low:.2f} ms | "
        f"{batch / median:,.0f} | {compiling:.0f} s | {calls / (args.steps + 1):.1f} |",
        flush=True,
    )
    if args.hlo:
        write_hlo(args, engine, f"decode_{batch}")
    if args.profile:
        show_profile(lambda: run_decode(engine, batch, length, 4), args.profile)


def bench_prefill(args: argparse.Namespace, config: Config, params: Any, batch: int) -> None:
    """Print a row for the prefill of `batch` prompts."""
    sizes = {"slots": batch, "max_tokens": args.length + 64, "step_tokens": args.step_tokens}
    engine = make_engine(args, config, params, **sizes)

    def run(count: int) -> float:
        for prompt in prompts(config, count, args.length):
            engine.add(Request(prompt, 1))
        start = time.perf_counter()
        for _ in engine.run():
            pass
        return time.perf_counter() - start

    compiling = run(max(args.step_tokens // args.length, 1))
    seconds = min(run(batch) for _ in range(3))
    print(
        f"| prefill, {batch} x {args.length} in steps of {args.step_tokens} | {seconds:.2f} s | | "
        f"{batch * args.length / seconds:,.0f} | {compiling:.0f} s | |",
        flush=True,
    )
    if args.profile:
        show_profile(lambda: run(max(args.step_tokens // args.length, 1)), args.profile)


def bench_slice(args: argparse.Namespace) -> None:
    """Print a row for each batch and context: microseconds of a layer, by part."""
    config = parse_config(SLICES[args.slice] | (QUICK_SLICE if args.quick else {}))
    dtype, least = jnp.dtype(args.dtype), 2
    weights = jax.block_until_ready(slice_work.draw_weights(config, dtype))
    size = sum(x.nbytes for x in jax.tree.leaves(weights))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {config.model_type}, "
          f"{size / 1e9:.2f} GB of weights in two layers; microseconds of a layer\n")  # fmt: skip
    print(f"| batch x context | {' | '.join(PARTS)} | sum | layer | jax_mla | spread | error |")
    print("|---|" + "---|" * (len(PARTS) + 5), flush=True)
    notes = []
    for length, batch in itertools.product(args.context, args.batch):
        one = slice_work.bytes_of_a_cache(config, batch, length, dtype, args.index_format)
        caches = int(min(max(args.cache_gb * 1e9 // one, least), args.max_caches)) // 2 * 2
        work = slice_work.make(
            config, weights, batch=batch, length=length, caches=caches, backend=args.backend,
            index_format=args.index_format,
        )  # fmt: skip
        error = slice_work.check(work)
        chains = slice_work.chains(work, args.calls)
        names = list(chains)
        samples = timing.time_in_turn(
            list(chains.values()), repeats=args.repeats, min_seconds=args.turn_ms * 1e-3,
            min_dispatches=4,
        )  # fmt: skip
        us = {name: 1e6 * each.seconds for name, each in zip(names, samples, strict=True)}
        # These were timed up to their end.
        us["feed-forward"] -= us["output"]
        us["output"] -= us["projections"]
        total = sum(us[name] for name in PARTS)
        ours = sum(us[name] for name in slice_work.OURS) / us["layer"]
        spread = max(each.spread for each in samples)
        figures = " | ".join(f"{us[name]:.1f}" for name in PARTS)
        print(
            f"| {batch} x {length} | {figures} | {total:.1f} | {us['layer']:.1f} | {ours:.1%} | "
            f"{spread:.1%} | {error:.1e} |",
            flush=True,
        )
        seconds = sum(chain.compile_seconds for chain in chains.values())
        notes.append(f"# {batch} x {length}: {caches} caches, {seconds:.0f} s of compiling")
        del work, chains
        gc.collect()
    print("\n" + "\n".join(notes))


def show_profile(fn: Any, rows: int) -> None:
    """Print the kernels that took longest while `fn` ran."""
    times = timing.trace_kernels(fn)
    if times is None:
        print("(the trace shows no kernel)", flush=True)
        return
    total = sum(seconds for _, seconds in times.kernels.values())
    count = sum(count for count, _ in times.kernels.values())
    print(f"\n{count} kernels, {1e3 * total:.2f} ms in all; the longest in sum:\n")
    print("| kernel | times | ms | us each |\n|---|---|---|---|")
    for name, (count, seconds) in list(times.kernels.items())[:rows]:
        each = 1e6 * seconds / count
        print(f"| {name[:90]} | {count} | {1e3 * seconds:.3f} | {each:.1f} |")
    print(flush=True)


def write_hlo(args: argparse.Namespace, engine: Engine, name: str) -> None:
    """Write the compiled program of a decode step."""
    args.hlo.mkdir(parents=True, exist_ok=True)
    (args.hlo / f"{name}.txt").write_text(engine.compiled_text())


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("--batch", type=int, nargs="*", help="decode steps to time")
    option("--length", type=int, default=2048, help="cached tokens; half of it from batch 128 on")
    option("--steps", type=int, default=64, help="decode steps of a run")
    option("--prefill", type=int, nargs="*", default=[32], help="numbers of prompts to prefill")
    option("--step-tokens", type=int, default=8192, help="tokens of a prefill step")
    option("--product", help="how experts are computed (default: the best that is installed)")
    option("--backend", help="jax_mla backend")
    option("--dtype", default="bfloat16")
    option("--layers", type=int, default=27)
    option("--profile", type=int, nargs="?", const=25, metavar="N", help="print the N top kernels")
    option("--hlo", type=pathlib.Path, metavar="DIR", help="write the compiled decode steps there")
    option("--quick", action="store_true", help="a tiny model, for a CPU")
    group = parser.add_argument_group("a layer with sparse attention")
    option = group.add_argument
    option("--slice", choices=SLICES, help="time a layer of this shape by part, and nothing else")
    option("--context", type=int, nargs="*", default=[8192, 65536], help="cached tokens")
    option("--index-format", choices=INDEX_FORMATS, help="index keys and queries in FP8")
    option("--calls", type=int, default=16, help="layers of a dispatch")
    option("--cache-gb", type=float, default=16, help="total of the caches; there are at least two")
    option("--max-caches", type=int, default=60, help="most caches")
    option("--repeats", type=int, default=7)
    option("--turn-ms", type=float, default=20, help="length of a repeat")
    args = parser.parse_args(argv)
    if args.batch is None:
        args.batch = [1, 32, 128] if args.slice else [1, 8, 32, 128]
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the weights and print the table."""
    args = parse_args(argv)
    raw = dict(QUICK) if args.quick else V2_LITE | {"num_hidden_layers": args.layers}
    if args.quick:
        args.length, args.steps, args.step_tokens, args.dtype = 64, 8, 64, "float32"
        args.batch, args.prefill = [2], [4]
        args.context, args.calls, args.repeats, args.turn_ms = [96], 2, 1, 1
        args.max_caches = 2
    if args.slice:
        bench_slice(args)
        return
    config = parse_config(raw)
    start = time.perf_counter()
    params = jax.block_until_ready(random_params(config, jnp.dtype(args.dtype)))
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    device, product = jax.devices()[0], args.product or "the best that is installed"
    print(f"{device.device_kind}, jax {jax.__version__}: {size / 1e9:.1f} GB of weights in "
          f"{time.perf_counter() - start:.1f} s; experts by {product}\n")  # fmt: skip
    print("| what | median | least | tokens/s | compiling | handler calls a step |")
    print("|---|---|---|---|---|---|", flush=True)
    for batch in args.batch:
        bench_decode(args, config, params, batch)
        gc.collect()
    for batch in args.prefill:
        bench_prefill(args, config, params, batch)
        gc.collect()


if __name__ == "__main__":
    main()

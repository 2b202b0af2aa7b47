"""Time a sliding window of 512 tokens in 32768 against sequences of 512 tokens, on a GPU.

    python benchmarks/bench_window.py BATCH NUM_HEADS

A program has 20 layers, as a model has them: what does not depend on the layer is computed once.
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_mla

LAYERS, WINDOW, LENGTH, PAGE_SIZE, REPEATS = 20, 512, 32768, 64, 30


def time_us(batch: int, num_heads: int, length: int, **options) -> float:
    """Return the microseconds of a call."""
    pages = length // PAGE_SIZE
    pool = jnp.zeros((batch * pages + 1, PAGE_SIZE, 576), jnp.bfloat16)
    ids = np.random.default_rng(0).permutation(batch * pages).astype(np.int32)
    table, lens = jnp.asarray(ids.reshape(batch, pages)), jnp.full(batch, length, jnp.int32)
    q = jnp.ones((batch, num_heads, 576), jnp.bfloat16)

    @jax.jit
    def layers(q, pool, table, lens):
        decode = functools.partial(jax_mla.decode, sm_scale=0.04, **options)
        for _ in range(LAYERS):
            out = decode(q[..., :512], q[..., 512:], pool, table, lens)
            q = q.at[..., :512].add(out)
        return q

    args = q, pool, table, lens
    jax.block_until_ready(layers(*args))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        results = [layers(*args) for _ in range(REPEATS)]
        jax.block_until_ready(results)
        best = min(best, time.perf_counter() - start)
    return best / REPEATS / LAYERS * 1e6


def main() -> None:
    """Print the times."""
    batch, num_heads = int(sys.argv[1]), int(sys.argv[2])
    for backend in (None, "sm80"):
        short = time_us(batch, num_heads, WINDOW, backend=backend)
        window = time_us(batch, num_heads, LENGTH, sliding_window=WINDOW, backend=backend)
        print(
            f"{batch} x {num_heads} heads, {backend or 'chosen'}: length {WINDOW} {short:.1f} us, "
            f"window {WINDOW} of {LENGTH} {window:.1f} us, {window / short:.2f}"
        )


if __name__ == "__main__":
    main()

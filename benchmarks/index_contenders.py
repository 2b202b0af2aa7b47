"""Ours: jitted functions of many calls of `index_topk` and of `index_append`."""

import functools
import time
from typing import Any

import bench_append
import contenders
import jax
import jax.numpy as jnp
import numpy as np
from index_grid import DIM, KEY_BYTES, PAGE_SIZE, AppendCase
from index_work import IndexWorkload

import jax_mla


def index_topk(work: IndexWorkload, backend: str | None) -> Any:
    """`jax_mla.index_topk` on one cache of the stacked pool."""

    def call(q, weights, pools, page_table, seq_lens, layer):
        return jax_mla.index_topk(
            q, weights, pools, page_table, seq_lens, k=work.case.topk, layer=layer, backend=backend
        )

    return call


class TopkCalls:
    """A jitted function of `calls` calls of `index_topk`, each over the next cache.

    No result of a call can be an operand of the next one. So the lengths that all calls return,
    joined, are the function's result: no call is left out. Calls over the same cache have copies of
    the lengths, so the compiler does not take them for one. A barrier of the compiler, which is no
    kernel, keeps the order of the calls. The result is donated to the next dispatch, so buffers
    keep their addresses. (Hundreds of results would cost the host more than the device computes.)
    """

    def __init__(self, name: str, work: IndexWorkload, calls: int, backend: str | None) -> None:
        """Compile and warm up."""
        self.name, self.calls = name, calls
        *operands, seq_lens = work.operands
        rounds = -(-calls // work.num_caches)
        self._operands = (*operands, [jnp.copy(seq_lens) for _ in range(rounds)])
        call = index_topk(work, backend)

        # An operand that is only donated is unused.
        @functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
        def step(last, q, weights, pools, page_table, seq_lens):
            del last
            all_lens = []
            for i in range(calls):
                turn, cache = divmod(i, work.num_caches)
                found = call(q, weights, pools, page_table, seq_lens[turn], cache)
                seq_lens, (_, lens) = jax.lax.optimization_barrier((seq_lens, found))
                all_lens.append(lens)
            return jnp.concatenate(all_lens)

        self._step = step
        self._last = jnp.zeros((calls * work.case.num_tokens,), jnp.int32)
        self.run(3)

    def run(self, dispatches: int) -> float:
        """Enqueue that many dispatches, wait for the last; return the host's share in seconds."""
        last = self._last
        start = time.perf_counter()
        for _ in range(dispatches):
            last = self._step(last, *self._operands)
        host = time.perf_counter() - start
        self._last = jax.block_until_ready(last)
        return host


def index_append(case: AppendCase, pool: jax.Array, new: dict[str, Any], layer: int, backend=None):
    """`jax_mla.index_append`."""
    interleaved = False if case.is_raw else None
    return jax_mla.index_append(
        pool, **new, layer=layer, backend=backend, rope_interleaved=interleaved
    )


def append_operands(case: AppendCase, layers: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return a zeroed stacked pool, and the arrays that `index_append` gets besides."""
    rng = np.random.default_rng(0)
    like = twin(case)
    _, new = bench_append.operands(like, 1)
    found = {name: new[name] for name in ("page_table", "positions")}
    keys = rng.standard_normal((case.batch, case.q_len, DIM), np.float32)
    found["k"] = jnp.asarray(keys, jnp.bfloat16)
    if case.is_raw:
        found["norm_weight"], found["norm_bias"] = jnp.ones(DIM), jnp.zeros(DIM)
        found["rope_table"] = new["rope_table"]
    pages = case.batch * -(-case.seq // PAGE_SIZE)
    return jnp.zeros((layers, pages, PAGE_SIZE, KEY_BYTES), jnp.uint8), found


def twin(case: AppendCase) -> bench_append.AppendCase:
    """Return the call of `append` that moves as many bytes, but for the scales: 64 + 64 values."""
    return bench_append.AppendCase(
        case.batch, case.q_len, case.seq, PAGE_SIZE, d_ckv=DIM // 2, d_kpe=DIM // 2,
        kv_format="fp8_e4m3", is_raw=case.is_raw,
    )  # fmt: skip


def check_append(case: AppendCase) -> None:
    """Append once and compare all bytes with the definition's.

    Raises:
      AssertionError: More than a hundredth of them differ, or, of keys that are only encoded, any.
    """

    def first_layer(backend: str | None) -> np.ndarray:
        pool, new = append_operands(case, 1)
        run = jax.jit(functools.partial(index_append, case, layer=0, backend=backend))
        return np.asarray(run(pool, new))

    differs = (first_layer(None) != first_layer("reference")).mean()
    assert differs <= (0.01 if case.is_raw else 0), "index_append wrote other bytes"


def append_calls(case: AppendCase, layers: int, calls: int) -> list[contenders.ChainedCalls]:
    """Return `index_append` and `append` of as many bytes, each over the layers of a pool."""
    like = twin(case)
    return [
        contenders.ChainedCalls(
            name, functools.partial(function, shape), operands, caches=layers, calls=calls
        )
        for name, function, shape, operands in (
            ("jax_mla", index_append, case, append_operands(case, layers)),
            ("jax_mla append", bench_append.ours, like, bench_append.operands(like, layers)),
        )
    ]


def append_bytes(case: AppendCase) -> int:
    """Bytes of one call: each new key is read once and written once."""
    return case.batch * case.q_len * (2 * DIM + KEY_BYTES)

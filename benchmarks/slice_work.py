"""Layers of a model with sparse attention at full size, and their parts, as jitted chains of calls.

The layers are those of examples/deepseek, with random weights. There are two sets of weights, which
take turns, and as many caches as `caches`: so neither is in L2 when its turn comes.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from index_work import pages_of

import jax_mla
from examples.deepseek.config import Config
from examples.deepseek.model import Place, attention, layer, paged_attention, rms_norm
from examples.deepseek.moe import Experts, gated_mlp
from examples.deepseek.rope import angles
from examples.deepseek.sparse import (
    FP8_HEAD_DIM,
    SparseCache,
    SparseState,
    encode_queries,
    index_pool,
)
from examples.deepseek.weights import Parameter, parameters

PAGE_SIZE = 64
CHECKED = 4  # sequences that are compared with the reference
OURS = ("index_append", "index_topk", "append", "sparse_attention")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("weights", "rows", "keys", "place", "hidden", "cos_sin"),
    meta_fields=("config", "backend"),
)
@dataclasses.dataclass(frozen=True)
class Slice:
    """Operands of decode steps: every sequence has one new token, at the end of its context.

    Attributes:
      config: of a model without experts; its number of layers is that of the sets of weights.
      weights: of each layer.
      rows: [caches, pages, page_size, d_ckv + d_kpe], random.
      keys: [caches, pages, page_size, index head_dim], random; in FP8 the last one has 132 bytes.
      place: a `Place`: page table, lengths and positions.
      hidden: [batch, hidden].
      cos_sin: rotary angles of the positions.
      backend: passed to jax_mla.
    """

    config: Config
    weights: list[dict[str, jax.Array]]
    rows: jax.Array
    keys: jax.Array
    place: Any
    hidden: jax.Array
    cos_sin: jax.Array
    backend: str | None

    @property
    def caches(self) -> int:
        """How many caches take turns."""
        return self.rows.shape[0]

    @property
    def where(self) -> tuple[Any, Any]:
        """The pages and positions that new tokens are written to."""
        assert self.place.positions is not None
        return self.place.page_table, self.place.positions


def bytes_of_a_cache(
    config: Config, batch: int, length: int, dtype: Any, index_format: str | None
) -> int:
    """Bytes of the rows and index keys of a layer."""
    assert config.index is not None
    pages = batch * -(-length // PAGE_SIZE)
    width = config.kv_lora_rank + config.qk_rope_head_dim
    keys = index_pool(config.index, pages, PAGE_SIZE, dtype, index_format)
    key_bytes = math.prod(keys.shape[1:]) * keys.dtype.itemsize
    return pages * PAGE_SIZE * width * jnp.dtype(dtype).itemsize + key_bytes


def draw_weights(config: Config, dtype: Any) -> list[dict[str, jax.Array]]:
    """Draw the weights on the device."""
    numbers = itertools.count()

    def draw(parameter: Parameter) -> jax.Array:
        shape, name = parameter.shape, jnp.dtype(parameter.dtype).name
        # A matrix keeps the size of values; it has one of these dimensions.
        fan_in = shape[-1] if len(shape) > 1 else 1
        return _normal(jax.random.key(next(numbers)), shape, name, fan_in**-0.5)

    return jax.tree.map(draw, parameters(config, dtype)["layers"])


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: str, scale: float) -> jax.Array:
    return jax.random.normal(key, shape, dtype) * jnp.asarray(scale, dtype)


def make(
    config: Config,
    weights: list[dict[str, jax.Array]],
    *,
    batch: int,
    length: int,
    caches: int,
    backend: str | None,
    index_format: str | None = None,
) -> Slice:
    """Draw caches and inputs on the device."""
    assert config.index is not None
    dtype = weights[0]["qkv_a"].dtype
    columns = -(-length // PAGE_SIZE)
    pages = batch * columns
    table = np.random.default_rng(0).permutation(pages).reshape(batch, columns)
    lens = jnp.full(batch, length, jnp.int32)
    positions = lens - 1
    width = config.kv_lora_rank + config.qk_rope_head_dim
    keys = index_pool(config.index, pages, PAGE_SIZE, dtype, index_format)
    return Slice(
        config=config,
        weights=weights,
        rows=_pool(1, (caches, pages, PAGE_SIZE, width), dtype.name),
        keys=_pool(2, (caches, *keys.shape[1:]), keys.dtype.name),
        place=Place(jnp.asarray(table, jnp.int32), lens, None, positions),
        hidden=_normal(jax.random.key(3), (batch, config.hidden_size), dtype.name, 1.0),
        cos_sin=angles(config.rope, config.qk_rope_head_dim, length, positions),
        backend=backend,
    )


def _pool(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Draw a pool, one cache after the other: the bits of all would not fit."""
    pool = jax.jit(jnp.zeros, static_argnums=(0, 1))(shape, dtype)
    for cache in range(shape[0]):
        pool = _fill(pool, jax.random.key(seed * 1000 + cache), cache)
    return pool


@functools.partial(jax.jit, donate_argnums=0)
def _fill(pool: jax.Array, key: jax.Array, cache: int) -> jax.Array:
    if pool.dtype == jnp.uint8:  # keys in FP8
        codes = jax.random.normal(key, (*pool.shape[1:3], FP8_HEAD_DIM), jnp.bfloat16)
        scales = jnp.ones(pool.shape[1:3], jnp.float32)
        values = pages_of(codes.astype(jnp.float8_e4m3fn), scales)
    else:
        values = jax.random.normal(key, pool.shape[1:], pool.dtype)
    return jax.lax.dynamic_update_index_in_dim(pool, values, cache, 0)


class Chain:
    """A jitted function of `calls` calls over caches and weights that take turns.

    A call takes the carry, and returns the next one and what else it computes. All of that is a
    result of the function, so nothing is left out, and a barrier of the compiler, which is no
    kernel, keeps the order. Both are donated to the next dispatch, so buffers keep their addresses.
    """

    def __init__(
        self, name: str, call: Callable[..., Any], carry: Any, rest: Any, *, caches: int, calls: int
    ) -> None:
        """Compile and warm up.

        Args:
          name: for the report.
          call: call(carry, rest, number) -> (carry, other results); the number is a Python int.
          carry: the first one; it is copied.
          rest: arrays that no call changes.
          caches: how many numbers there are.
          calls: calls in a dispatch.
        """
        self.name, self.calls = name, calls
        self._rest = rest

        def step(carry: Any, rest: Any) -> tuple[Any, list[Any]]:
            results = []
            for i in range(calls):
                carry, found = call(carry, rest, i % caches)
                carry, found = jax.lax.optimization_barrier((carry, found))
                results.append(found)
            return carry, results

        # An operand that is only donated is unused.
        @functools.partial(jax.jit, donate_argnums=(0, 1), keep_unused=True)
        def again(carry: Any, last: Any, rest: Any) -> tuple[Any, list[Any]]:
            del last
            return step(carry, rest)

        start = time.perf_counter()
        self._step = again
        carry = jax.tree.map(jnp.copy, carry)
        results = jax.eval_shape(step, carry, rest)[1]
        self._state = carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results)
        self.run(1)
        self.compile_seconds = time.perf_counter() - start
        # XLA records its command buffers in the first executions after the very first.
        self.run(2)

    def run(self, dispatches: int) -> float:
        """Enqueue that many dispatches, wait for the last; return the host's share in seconds."""
        state = self._state
        start = time.perf_counter()
        for _ in range(dispatches):
            state = self._step(*state, self._rest)
        host = time.perf_counter() - start
        self._state = jax.block_until_ready(state)
        return host


@dataclasses.dataclass
class _Before:
    """Stands for `attend`: keeps the operands of attention, and gives back what has its shape.

    Attributes:
      results: the operands, in the order in which jax_mla takes them.
    """

    results: Any = None

    def __call__(self, weights, layer, q_nope, q_pe, ckv, kpe, state, place, index):
        """Absorb w_uk and, as if that were the result of attention, multiply it by w_uv."""
        q_latent = jnp.einsum("thn,hnc->thc", q_nope, weights["w_uk"])
        self.results = q_latent, q_pe, ckv, kpe, index
        return jnp.einsum("thc,hcv->thv", q_latent, weights["w_uv"]), state


@functools.partial(jax.jit, static_argnums=1)
def before_attention(work: Slice, number: int, hidden: jax.Array) -> tuple[Any, jax.Array]:
    """Return the operands of attention, and what a layer adds to `hidden` if it did nothing."""
    attend, config, weights = _Before(), work.config, _weights(work, number)
    x = rms_norm(hidden, weights["input_norm"], config.rms_norm_eps)
    layer = jnp.int32(number)
    added, _ = attention(config, attend, weights, layer, x, work.cos_sin, None, work.place)
    *others, index = attend.results
    if work.keys.dtype == jnp.uint8:
        q, head_weights = encode_queries(index.q, index.weights)
        index = index._replace(q=q, weights=head_weights)
    return (*others, index), added


def _weights(work: Slice, number: int) -> dict[str, jax.Array]:
    return work.weights[number % len(work.weights)]


def without_ours(carry: jax.Array, work: Slice, number: int, *, upto: str) -> Any:
    """Run a layer without the four parts of jax_mla, up to a part."""
    operands, added = before_attention(work, number, carry)
    if upto == "projections":
        q_latent = operands[0]
        # The next input has to come from this call.
        return q_latent.reshape(q_latent.shape[0], -1)[:, : carry.shape[-1]], operands
    hidden, weights = carry + added, _weights(work, number)
    if upto == "output":
        return hidden, operands
    x = rms_norm(hidden, weights["post_norm"], work.config.rms_norm_eps)
    return hidden + gated_mlp(weights["gate_up"], weights["down"], x), operands


def whole(carry: Any, work: Slice, number: int) -> Any:
    """Run a layer."""
    hidden, cache = carry
    hidden, state, _ = layer(
        work.config, paged_attention(work.config, work.backend), Experts(), _weights(work, number),
        jnp.int32(number), hidden, work.cos_sin, SparseState(cache), work.place, None,
    )  # fmt: skip
    return (hidden, state.cache), ()


def index_append(keys: jax.Array, rest: Any, number: int) -> Any:
    """Write the new index keys."""
    k, work = rest
    return jax_mla.index_append(keys, k, *work.where, layer=number, backend=work.backend), ()


def index_topk(seq_lens: jax.Array, rest: Any, number: int, **options: Any) -> Any:
    """Choose."""
    inputs, keys, work = rest
    return seq_lens, jax_mla.index_topk(
        inputs.q, inputs.weights, keys, work.place.page_table, seq_lens, k=work.config.index.topk,
        layer=number, backend=work.backend, **options,
    )  # fmt: skip


def append(rows: jax.Array, rest: Any, number: int) -> Any:
    """Write the new rows."""
    *new, work = rest
    return jax_mla.append(rows, *new, *work.where, layer=number, backend=work.backend), ()


def sparse_attention(q_latent: jax.Array, rest: Any, number: int) -> Any:
    """Attend."""
    q_pe, rows, slots, lens, work = rest
    return jax_mla.sparse_attention(
        q_latent, q_pe, rows, slots, sm_scale=work.config.sm_scale, topk_lens=lens, layer=number,
        backend=work.backend,
    ), ()  # fmt: skip


def chains(work: Slice, calls: int) -> dict[str, Chain]:
    """Compile the whole layer, each of our parts, and the rest up to three places."""
    (q_latent, q_pe, ckv, kpe, inputs), _ = before_attention(work, 0, work.hidden)
    seq_lens = work.place.seq_lens
    _, chosen = index_topk(seq_lens, (inputs, work.keys, work), 0)
    rounds = max(calls, work.caches)
    cases: dict[str, tuple[Any, Any, Any, int]] = {
        "layer": (whole, (work.hidden, SparseCache(work.rows, work.keys)), work, calls),
        "index_append": (index_append, work.keys, (inputs.k, work), rounds),
        "index_topk": (index_topk, seq_lens, (inputs, work.keys, work), rounds),
        "append": (append, work.rows, (ckv, kpe, work), rounds),
        "sparse_attention": (sparse_attention, q_latent, (q_pe, work.rows, *chosen, work), rounds),
    }
    for upto in ("projections", "output", "feed-forward"):
        call = functools.partial(without_ours, upto=upto)
        cases[upto] = (call, work.hidden, work, calls)
    return {
        name: Chain(name, call, carry, rest, caches=work.caches, calls=number)
        for name, (call, carry, rest, number) in cases.items()
    }


def check(work: Slice) -> float:
    """Compare a layer's four steps with the float32 reference, for a few sequences.

    Returns:
      The relative error of attention.

    Raises:
      AssertionError: a row or a key is not where it belongs, other tokens were chosen, or the error
        is more than 2 %.
    """
    config, place, few = work.config, work.place, slice(0, CHECKED)
    assert config.index is not None and place.positions is not None
    (q_latent, q_pe, ckv, kpe, inputs), _ = before_attention(work, 0, work.hidden)
    rows, _ = append(work.rows, (ckv, kpe, work), 0)
    keys, _ = index_append(work.keys, (inputs.k, work), 0)
    _, (slots, lens, scores) = index_topk(
        place.seq_lens, (inputs, keys, work), 0, return_scores=True
    )
    out, _ = sparse_attention(q_latent, (q_pe, rows, slots, lens, work), 0)
    # The pages of these sequences, one behind the other.
    table = jnp.asarray(place.page_table)[few]
    small_rows, small_keys = rows[0, table.reshape(-1)], keys[0, table.reshape(-1)]
    small_table = jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape)
    page, offset = small_table[:, -1], place.positions[few] % PAGE_SIZE
    row = jnp.concatenate([ckv, kpe], -1)[few]
    np.testing.assert_array_equal(small_rows[page, offset], row, err_msg="append")
    expected_keys = jax_mla.reference.index_append(
        work.keys[0, table.reshape(-1)], inputs.k[few], small_table, place.positions[few]
    )
    np.testing.assert_array_equal(small_keys, expected_keys, err_msg="index_append")
    _, best_lens, best_scores = jax_mla.index_topk(
        inputs.q[few], inputs.weights[few], small_keys, small_table, place.seq_lens[few],
        k=config.index.topk, return_scores=True, backend="reference",
    )  # fmt: skip
    np.testing.assert_array_equal(lens[few], best_lens, err_msg="index_topk")
    # Which of two nearly equal tokens is chosen depends on rounding. How large the scores are does
    # not.
    ours, best_scores = (np.sort(np.asarray(x, np.float32)) for x in (scores[few], best_scores))
    np.testing.assert_allclose(ours, best_scores, rtol=1e-3, atol=1e-4, err_msg="index_topk")
    # Our choice, in the numbers of the small pool.
    pages = (
        jnp.full(rows.shape[1], -1, jnp.int32).at[table.reshape(-1)].set(small_table.reshape(-1))
    )
    chosen = slots[few]
    chosen = jnp.where(chosen < 0, -1, pages[chosen // PAGE_SIZE] * PAGE_SIZE + chosen % PAGE_SIZE)
    q_nope, q_rotated, wide_rows = (
        x.astype(jnp.float32) for x in (q_latent[few], q_pe[few], small_rows)
    )
    expected: Any = jax_mla.sparse_attention(
        q_nope, q_rotated, wide_rows, chosen, sm_scale=config.sm_scale, topk_lens=lens[few],
        backend="reference",
    )  # fmt: skip
    difference = jnp.linalg.norm(out[few].astype(jnp.float32) - expected)
    error = float(difference / jnp.linalg.norm(expected))
    assert error < 0.02, f"sparse_attention: relative error {error:.2e}"
    return error

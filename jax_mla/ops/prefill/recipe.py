"""The parts of `prefill`: lay out the prompts, attend, read the cached prefix in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_mla import _dispatch
from jax_mla._quantization import decode_rows, split_rows
from jax_mla.kv_cache import PoolSizes, local_pages, pool_sizes
from jax_mla.ops import _ragged
from jax_mla.ops.decode.reference import gather_rows
from jax_mla.ops.merge.api import merge
from jax_mla.ops.prefill.attention import attend


class Tokens(NamedTuple):
    """The new tokens.

    Attributes:
      q_nope: [tokens, heads, d_nope].
      q_pe: [tokens, heads, d_kpe].
      ckv: [tokens, d_ckv].
      kpe: [tokens, d_kpe].
    """

    q_nope: Array
    q_pe: Array
    ckv: Array
    kpe: Array


class Weights(NamedTuple):
    """The up-projections.

    Attributes:
      w_uk: [heads, d_nope, d_ckv].
      w_uv: [heads, d_ckv, d_v].
    """

    w_uk: Array
    w_uv: Array


class Cache(NamedTuple):
    """The cache and the place of each sequence in it.

    Attributes:
      kv_pages: one pool or two.
      page_table: [seqs, max_pages_per_seq] int32.
      seq_lens: [seqs] int32.
      layer: [1] int32, any for a pool without layers.
      page_begin: [1] int32.
      kv_scale: [1, 2] float32, of ckv and kpe; None if the format has none.
    """

    kv_pages: tuple[Array, ...]
    page_table: Array
    seq_lens: Array
    layer: Any
    page_begin: Any
    kv_scale: Any = None


class Params(NamedTuple):
    """The static parameters of a call, see `prefill`."""

    sm_scale: float
    max_q_len: int
    prefix_chunk: int
    has_layer: bool
    axis_name: str | tuple[str, ...] | None
    implementation: str | None
    kv_format: str | None = None


class Prompts(NamedTuple):
    """Where the new tokens of each sequence are.

    Attributes:
      begin: [seqs] int32, the first new token.
      end: [seqs] int32, one past the last new token.
      prefix_lens: [seqs] int32, the tokens before the new ones.
    """

    begin: Array
    end: Array
    prefix_lens: Array


def find_prompts(
    num_tokens: int,
    cu_q_lens: Array,
    num_seqs: Array | int | None,
    seq_lens: Array | None,
    capacity: int,
) -> Prompts:
    """Read `cu_q_lens` and the lengths, so that no bad value leads out of bounds.

    Args:
      num_tokens: rows of the new tokens.
      cu_q_lens: [seqs + 1] int32.
      num_seqs: sequences that are present, or None for all.
      seq_lens: [seqs] int32, or None if nothing is cached.
      capacity: tokens of a sequence that the page table has places for.
    """
    bounds = _ragged.bounds(cu_q_lens, num_seqs, num_tokens)
    end = bounds[1:]
    q_lens = end - bounds[:-1]
    prefix_lens = jnp.zeros_like(q_lens)
    if seq_lens is not None:
        seq_lens = jnp.clip(seq_lens, 0, capacity)
        # Tokens before the start of a sequence are padding, as in `decode`.
        q_lens = jnp.minimum(q_lens, seq_lens)
        prefix_lens = jnp.where(q_lens > 0, seq_lens - q_lens, 0)
    return Prompts(end - q_lens, end, prefix_lens)


def prefill(
    tokens: Tokens,
    weights: Weights,
    cache: Cache | None,
    cu_q_lens: Array,
    num_seqs: Array | int | None,
    *,
    params: Params,
) -> tuple[Array, Array]:
    """Run `prefill` on arguments that have been checked.

    Returns:
      out: [tokens, heads, d_v], dtype of q_nope.
      lse: [tokens, heads] float32.
    """
    num_tokens, q_len = tokens.ckv.shape[0], params.max_q_len
    capacity = 0
    if cache is not None:
        page_size = pool_sizes(cache.kv_pages[0], params.has_layer).page_size
        capacity = cache.page_table.shape[1] * page_size
    seq_lens = None if cache is None else cache.seq_lens
    prompts = find_prompts(num_tokens, cu_q_lens, num_seqs, seq_lens, capacity)
    q_lens = jnp.minimum(prompts.end - prompts.begin, q_len)

    place = jnp.arange(q_len, dtype=jnp.int32)[None]
    source = jnp.clip(prompts.begin[:, None] + place, 0, num_tokens - 1)
    padded = Tokens(*(_zero_from(x[source], q_lens) for x in tokens))
    q = jnp.concatenate([padded.q_nope, padded.q_pe], axis=-1)
    k, v = _up_project(padded.ckv, padded.kpe, weights)
    out, lse = attend(
        q, k, v, q_lens, q_lens,
        sm_scale=params.sm_scale, causal=True, implementation=params.implementation,
    )  # fmt: skip
    if cache is not None:
        part = _attend_to_prefix(q, q_lens, prompts.prefix_lens, weights, cache, params)
        out, lse = _merge((out, lse), part)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = jnp.sum(token[:, None] >= prompts.end[None], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, q_lens.shape[0] - 1)
    index = token - prompts.begin[seq]
    used = (index >= 0) & (index < q_lens[seq])
    index = jnp.clip(index, 0, q_len - 1)
    out = jnp.where(used[:, None, None], out[seq, index].astype(tokens.q_nope.dtype), 0)
    return out, jnp.where(used[:, None], lse[seq, index], -jnp.inf)


def _attend_to_prefix(
    q: Array, q_lens: Array, prefix_lens: Array, weights: Weights, cache: Cache, params: Params
) -> tuple[Array, Array]:
    """Attend to the cached tokens before the new ones, a chunk of bounded memory at a time."""
    sizes = pool_sizes(cache.kv_pages[0], params.has_layer)
    page_table, lens = _owned_pages(cache, sizes, prefix_lens)
    (seqs, max_pages), page_size = page_table.shape, sizes.page_size
    layer = cache.layer[0] if params.has_layer else None
    pages = min(max(params.prefix_chunk // (seqs * page_size), 1), max_pages)
    chunk = pages * page_size
    d_nope, d_ckv = weights.w_uk.shape[1:]
    d_kpe = q.shape[-1] - d_nope
    empty_out = jnp.zeros((*q.shape[:-1], weights.w_uv.shape[-1]), jnp.float32)
    empty_lse = jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)
    # A loop's state varies over the same manual axes as what is added to it.
    empty_out, empty_lse, *_ = _dispatch.align_manual_axes(
        [empty_out, empty_lse, q, q_lens, *jax.tree.leaves((weights, cache, prefix_lens))]
    )

    def add_chunk(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        columns = i * pages + jnp.arange(pages, dtype=jnp.int32)
        ids = jnp.take(page_table, columns, axis=1, mode="fill", fill_value=-1)
        kv_lens = jnp.clip(lens - i * chunk, 0, chunk)
        rows = [
            _zero_from(gather_rows(pool, ids, layer, cache.page_begin[0])[0], kv_lens)
            for pool in cache.kv_pages
        ]
        ckv, kpe = _parts(rows, d_ckv, d_kpe, cache, params)
        k, v = _up_project(ckv.astype(q.dtype), kpe.astype(q.dtype), weights)
        part = attend(
            q, k, v, q_lens, kv_lens,
            sm_scale=params.sm_scale, causal=False, implementation=params.implementation,
        )  # fmt: skip
        return _merge(state, part)

    num_chunks = (jnp.max(lens) + chunk - 1) // chunk
    out, lse = lax.fori_loop(0, num_chunks, add_chunk, (empty_out, empty_lse))
    return (out, lse) if params.axis_name is None else merge(out, lse, axis_name=params.axis_name)


def _parts(
    rows: Sequence[Array], d_ckv: int, d_kpe: int, cache: Cache, params: Params
) -> tuple[Array, Array]:
    """Return ckv and kpe of cached rows, in float32 if the call names a format."""
    if params.kv_format is None:
        return split_rows(rows, d_ckv, d_kpe)
    scale = cache.kv_scale
    pair = None if scale is None else (scale[0, 0], scale[0, 1])
    return decode_rows(rows, d_ckv, d_kpe, params.kv_format, pair)


def _owned_pages(cache: Cache, sizes: PoolSizes, prefix_lens: Array) -> tuple[Array, Array]:
    """Move the pages that the pool holds to the front of each row of the page table.

    cuDNN takes lengths and no mask. The order of the keys does not matter here, and a page that is
    not full stays behind the full ones.

    Returns:
      page_table: [seqs, max_pages_per_seq] int32, with -1 behind the pages that are kept.
      lens: [seqs] int32, the prefix's tokens on them.
    """
    num_layers, num_pages, page_size = sizes
    seqs, max_pages = cache.page_table.shape
    place = jnp.arange(max_pages, dtype=jnp.int32)[None]
    _, owned = local_pages(cache.page_table, cache.page_begin[0], num_pages)
    owned &= (cache.layer[0] >= 0) & (cache.layer[0] < num_layers)
    num_tokens = jnp.clip(prefix_lens[:, None] - place * page_size, 0, page_size)
    num_tokens = jnp.where(owned, num_tokens, 0)
    kept = num_tokens > 0
    target = jnp.where(kept, jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1, max_pages)
    row = jnp.arange(seqs, dtype=jnp.int32)[:, None]
    page_table = (
        jnp.full_like(cache.page_table, -1).at[row, target].set(cache.page_table, mode="drop")
    )
    return page_table, jnp.sum(num_tokens, axis=1, dtype=jnp.int32)


def _up_project(ckv: Array, kpe: Array, weights: Weights) -> tuple[Array, Array]:
    """Make the keys and values of every head of rows [seqs, len, d_ckv] and [seqs, len, d_kpe]."""
    k_nope = jnp.einsum("stc,hnc->sthn", ckv, weights.w_uk)
    k_pe = jnp.broadcast_to(kpe[:, :, None], (*k_nope.shape[:-1], kpe.shape[-1]))
    v = jnp.einsum("stc,hcv->sthv", ckv, weights.w_uv)
    return jnp.concatenate([k_nope, k_pe], axis=-1), v


def _zero_from(x: Array, lens: Array) -> Array:
    """Zero x [seqs, len, ...] from each sequence's length on, because 0 times NaN is NaN."""
    place = jnp.arange(x.shape[1], dtype=jnp.int32)
    used = place[None] < lens[:, None]
    return jnp.where(used.reshape(*used.shape, *[1] * (x.ndim - 2)), x, 0)


def _merge(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    return merge(jnp.stack([a[0], b[0]]), jnp.stack([a[1], b[1]]))

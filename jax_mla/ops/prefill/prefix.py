"""The cached tokens before the new ones: where they are, and the keys and values made of them."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from jax_mla._quantization import decode_rows, split_rows
from jax_mla.kv_cache import local_pages, pool_sizes
from jax_mla.ops.decode import window
from jax_mla.ops.decode.reference import gather_rows
from jax_mla.ops.prefill.operands import Cache, Params, Weights


def owned_pages(cache: Cache, prefix_lens: Array, params: Params) -> tuple[Array, Array]:
    """Move the pages that the pool holds to the front of each row of the page table.

    The kernels take ranges of keys and no mask. The order of the keys does not matter here, and a
    page that is not full stays after the full ones.

    Returns:
      page_table: [seqs, max_pages_per_seq] int32, with -1 after the pages that are kept.
      lens: [seqs] int32, the prefix's tokens on them.
    """
    num_layers, num_pages, page_size = pool_sizes(cache.kv_pages[0], params.has_layer)
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


def pages_in_window(cache: Cache, prefix_lens: Array, params: Params) -> tuple[Array, Array]:
    """Cut off the pages before the window of the first new token, see `decode.window`.

    Returns:
      page_table: [seqs, pages] int32, among them those that the pool does not hold.
      lens: [seqs] int32, the prefix's tokens behind the pages that are cut off.
    """
    page_size = pool_sizes(cache.kv_pages[0], params.has_layer).page_size
    bound = cache.page_table.shape[1] * page_size
    short_bound = window.width(params.sliding_window, 1, page_size, bound)
    if short_bound is None:
        return cache.page_table, prefix_lens
    return window.shorten(
        cache.page_table, prefix_lens, window=params.sliding_window, q_len=1, page_size=page_size,
        bound=bound, short_bound=short_bound,
    )  # fmt: skip


def is_owned(cache: Cache, page_table: Array, params: Params) -> Array:
    """Return for each token of pages [seqs, pages] whether the pool holds its row."""
    num_layers, num_pages, page_size = pool_sizes(cache.kv_pages[0], params.has_layer)
    _, owned = local_pages(page_table, cache.page_begin[0], num_pages)
    owned &= (cache.layer[0] >= 0) & (cache.layer[0] < num_layers)
    return jnp.repeat(owned, page_size, axis=1)


def read_rows(cache: Cache, page_table: Array, params: Params) -> list[Array]:
    """Read the rows of pages [seqs, pages] of each pool: [seqs, pages * page_size, width]."""
    layer = cache.layer[0] if params.has_layer else None
    return [gather_rows(pool, page_table, layer, cache.page_begin[0])[0] for pool in cache.kv_pages]


def ckv_and_kpe(
    rows: Sequence[Array], weights: Weights, d_kpe: int, cache: Cache, params: Params
) -> tuple[Array, Array]:
    """Return ckv and kpe of cached rows, in the dtype of the weights."""
    d_ckv, dtype = weights.w_uk.shape[-1], weights.w_uk.dtype
    if params.kv_format is None:
        ckv, kpe = split_rows(rows, d_ckv, d_kpe)
    else:
        scale = cache.kv_scale
        pair = None if scale is None else (scale[0, 0], scale[0, 1])
        ckv, kpe = decode_rows(rows, d_ckv, d_kpe, params.kv_format, pair)
    return ckv.astype(dtype), kpe.astype(dtype)


def up_project(ckv: Array, weights: Weights) -> tuple[Array, Array]:
    """Make k_nope and v [..., heads, d] of ckv [..., d_ckv]."""
    # XLA would make one product of two that share an operand, and then copy both parts out of it.
    # The first barrier keeps it from computing ckv twice for that.
    ckv = lax.optimization_barrier(ckv)
    same_ckv = lax.optimization_barrier(ckv)
    return (
        jnp.einsum("...c,hnc->...hn", ckv, weights.w_uk),
        jnp.einsum("...c,hcv->...hv", same_ckv, weights.w_uv),
    )

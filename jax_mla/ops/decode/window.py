"""Shortens sequences to what a sliding window shows of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_mla.kv_cache import PoolSizes, local_pages


def width(window: int, q_len: int, page_size: int, bound: Any) -> int | None:
    """Return the bound of shortened lengths; None if no sequence can be shortened.

    It is that of the whole lengths but for whole pages: a sequence that is too long has to end in
    the same place of a page.

    Args:
      window: the most tokens that a query sees.
      q_len: queries of a sequence.
      page_size: tokens of a page.
      bound: what the lengths are clamped to, an int or a symbolic size.
    """
    longest = window + q_len - 1 + page_size - 1
    if not isinstance(bound, int):  # known only when the program runs; whole pages
        return longest + -longest % page_size
    return longest + (bound - longest) % page_size if bound > longest else None


def shorten(
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    window: int,
    q_len: int,
    page_size: int,
    bound: Any,
    short_bound: int,
) -> tuple[jax.Array, jax.Array]:
    """Cut whole pages off the front of every sequence, which none of its queries sees.

    Kernels then find sequences as short as the window: the kernel, its split and its scratch are
    those of short sequences. Only distances matter to the mask, so it stays as it is.

    Nothing here depends on the layer, so XLA computes it once for a step.

    Args:
      page_table: [batch, max_pages_per_seq] int32.
      seq_lens: [batch] int32, any values.
      window: the most tokens that a query sees.
      q_len: queries of each sequence.
      page_size: tokens of a page.
      bound: what the lengths are clamped to.
      short_bound: what the new lengths are clamped to, see `width`.

    Returns:
      The page table and the lengths of the shortened sequences. A negative length stays as it is,
      and one above `bound` is above `short_bound`.
    """
    lens = jnp.clip(seq_lens, 0, bound)
    num_cut = jnp.maximum(lens - (q_len - 1 + window), 0) // page_size
    if isinstance(bound, int):
        # Of a sequence that is too long, what is seen ends at the new bound.
        num_cut = jnp.where(seq_lens > bound, (bound - short_bound) // page_size, num_cut)
    else:
        seq_lens = lens
    place = jnp.arange(-(-short_bound // page_size), dtype=jnp.int32)
    last = page_table.shape[1] - 1
    columns = jnp.minimum(num_cut[:, None] + place[None], last)
    return (
        jnp.take_along_axis(page_table, columns, axis=1, mode="clip"),
        seq_lens - num_cut * page_size,
    )


def slots(
    page_table: jax.Array,
    seq_lens: jax.Array,
    page_begin: jax.Array,
    *,
    window: int,
    pool: PoolSizes,
    bound: Any,
) -> tuple[jax.Array, jax.Array]:
    """List where the tokens lie that the newest one of every sequence sees.

    They are all that such a query sees. So it needs no mask on a pool whose pages are tokens, and
    every kernel takes the call.

    Args:
      page_table: [batch, max_pages_per_seq] int32.
      seq_lens: [batch] int32, any values.
      page_begin: [1] int32.
      window: how many tokens are seen, less than `bound`.
      pool: sizes of the pool.
      bound: what the lengths are clamped to.

    Returns:
      slots: [batch, window] int32, in order; -1 for a token whose page the pool does not hold.
      lens: [batch] int32, how many tokens are seen.
    """
    _, num_pages, page_size = pool
    lens = jnp.clip(seq_lens, 0, bound)
    seen = jnp.minimum(lens, window)
    token = (lens - seen)[:, None] + jnp.arange(window, dtype=jnp.int32)[None]
    column = jnp.minimum(token // page_size, page_table.shape[1] - 1)
    pages = jnp.take_along_axis(page_table, column, axis=1, mode="clip")
    page, is_owned = local_pages(pages, page_begin[0], num_pages)
    return jnp.where(is_owned, page * page_size + token % page_size, -1), seen

"""Shortens sequences to what a sliding window shows of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


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

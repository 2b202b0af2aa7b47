"""Shortens sequences to the pages that a pool holds, for context parallelism."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla.kv_cache import PoolSizes, local_pages


def shorten(
    page_table: jax.Array,
    seq_lens: jax.Array,
    q_lens: jax.Array | int,
    page_begin: jax.Array,
    pool: PoolSizes,
    bound: Any,
) -> tuple[jax.Array, jax.Array]:
    """Shorten every sequence to the pages that the pool holds, so that no other page costs time.

    An absent page holds no keys, but a kernel still has to walk past it: a device with a quarter of
    the pages would take as long as one with all of them. The kept keys may move together, because
    only their order relative to the queries matters. The pages of the newest tokens always stay,
    and with them the causal mask and the rows of these tokens in their pages.

    Nothing here depends on the layer, so XLA computes it once for a step.

    Args:
      page_table: [*batch, max_pages_per_seq] int32.
      seq_lens: [*batch] int32, any values.
      q_lens: query tokens of the sequences, an int or [*batch] int32.
      page_begin: int32, as many dimensions as batch; each has size 1 or the batch's.
      pool: sizes of the pool.
      bound: what the lengths are clamped to, see `bound_of_lengths`.

    Returns:
      The page table and the lengths, clamped, of the shortened sequences.
    """
    _, num_pages, page_size = pool
    max_pages = page_table.shape[-1]
    lens = jnp.clip(seq_lens, 0, bound)
    batch = range(seq_lens.ndim)
    place = jnp.arange(max_pages, dtype=jnp.int32).reshape(*(1 for _ in batch), max_pages)
    _, owned = local_pages(page_table, page_begin[..., None], num_pages)
    last = jnp.maximum(lens - q_lens, 0) // page_size  # first page that stays in any case
    used = place < -(-lens // page_size)[..., None]
    keep = used & (owned | (place >= last[..., None]))
    target = jnp.where(keep, jnp.cumsum(keep, axis=-1, dtype=jnp.int32) - 1, max_pages + place)
    # Not a vmap of a one-dimensional scatter: JAX gives that a wrong type if another vmap with
    # spmd_axis_name is around it.
    along_last = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(seq_lens.ndim,),
        scatter_dims_to_operand_dims=(seq_lens.ndim,),
        operand_batching_dims=tuple(batch),
        scatter_indices_batching_dims=tuple(batch),
    )
    kept = lax.scatter(
        jnp.full_like(page_table, -1),
        target[..., None],
        page_table,
        along_last,
        unique_indices=True,
        mode="drop",
    )
    dropped = jnp.sum(used & ~keep, axis=-1, dtype=jnp.int32)  # only whole pages are dropped
    return kept, lens - dropped * page_size

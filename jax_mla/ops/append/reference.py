# ruff: noqa: F722, F821
"""The definition of append in `jax.numpy`: the specification of every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jax_mla.kv_cache import Cache, as_pools, like, local_pages
from jax_mla.ops import _checks

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


def append(
    kv_pages: Cache,
    ckv: Float[Array, "batch q_len d_ckv"],
    kpe: Float[Array, "batch q_len d_kpe"],
    page_table: Int[Array, "batch max_pages_per_seq"],
    positions: Int[Array, "batch q_len"],
    *,
    layer: Array | int | None = None,
    page_begin: Array | int = 0,
) -> Cache:
    """Write new tokens into a paged latent cache, as defined.

    Token i of sequence b at position p goes to row p % page_size of page
    page_table[b, p // page_size]. It is skipped if p is negative, past the table, or if the pool
    (or the layer) does not own that page. Two tokens for one slot: either may win.

    Args:
      kv_pages: a packed pool or a pair of pools, see `decode`.
      ckv: new latents, any float dtype; stored in the pool's.
      kpe: new rotated keys.
      page_table: int32 global page ids.
      positions: int32, place of each token in its sequence; negative skips it.
      layer: which layer of a stacked pool.
      page_begin: global id of the pool's first page.

    Returns:
      The cache with the tokens written, in the form of `kv_pages`.
    """
    pools = [jnp.asarray(pool) for pool in as_pools("jax_mla.reference.append", kv_pages)]
    if pools[0].ndim == 4:
        _checks.layer("jax_mla.reference.append", pools[0], layer is not None)
    page_table, positions = jnp.asarray(page_table), jnp.asarray(positions)
    rows = [jnp.concatenate([ckv, kpe], axis=-1)] if len(pools) == 1 else [ckv, kpe]
    num_pages, page_size = pools[0].shape[-3:-1]
    max_pages = page_table.shape[1]

    place = jnp.clip(positions // page_size, 0, max_pages - 1)
    page = jnp.take_along_axis(page_table, place, axis=1)  # [batch, q_len]
    local, owned = local_pages(page, page_begin, num_pages)
    owned &= (positions >= 0) & (positions // page_size < max_pages)
    # An index past the pool drops the write.
    page = jnp.where(owned, local, num_pages)
    slot = jnp.where(owned, positions % page_size, 0)
    new_pools = []
    for pool, new in zip(pools, rows, strict=True):
        new = new.astype(pool.dtype)
        if pool.ndim == 3:
            new_pools.append(pool.at[page, slot].set(new, mode="drop"))
        else:
            num_layers = pool.shape[0]
            which = jnp.clip(layer, -1, num_layers).reshape(())
            # A negative layer is outside the pool, not counted from its end.
            which = jnp.where(which < 0, num_layers, which).astype(jnp.int32)
            new_pools.append(pool.at[which, page, slot].set(new, mode="drop"))
    return like(kv_pages, new_pools)

"""The definition of append in jax.numpy, which specifies what every backend does."""

from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
from jax import Array

from jax_mla import _quantization
from jax_mla.kv_cache import Cache, KvScale, as_pools, like, local_pages, pool_sizes
from jax_mla.ops import _checks, _eager, _ragged


@_eager.definition
def append(
    kv_pages: Cache,
    ckv: Annotated[Array, "[batch, q_len, d_ckv], [batch, d_ckv] or [tokens, d_ckv]"],
    kpe: Annotated[Array | None, "[batch, q_len, d_kpe], [batch, d_kpe] or [tokens, d_kpe]"],
    page_table: Annotated[Array, "[batch, max_pages_per_seq] int32"],
    positions: Annotated[Array, "[batch, q_len], [batch] or [tokens] int32"],
    *,
    cu_q_lens: Annotated[Array, "[batch + 1] int32"] | None = None,
    layer: Array | int | None = None,
    packs: bool = False,
    page_begin: Array | int = 0,
    kv_format: str | None = None,
    kv_scale: KvScale | None = None,
) -> Cache:
    """Write new tokens into the paged latent cache, by definition.

    Token i of sequence b, at position p = positions[b, i], goes to row p % page_size of page
    page_table[b, p // page_size]. It is skipped if p is negative or past the page table, or if the
    pool or the layer does not have the page. If two tokens go to the same row, either may win.

    Args:
      kv_pages: one pool or a tuple of two, as for `jax_mla.append`.
      ckv: [batch, q_len, d_ckv], or [batch, d_ckv] for q_len 1; any float dtype, stored as
        kv_format says.
      kpe: [batch, q_len, d_kpe], or [batch, d_kpe]; None if the rows have no rotary part.
      page_table: [batch, max_pages_per_seq] int32, global page ids.
      positions: [batch, q_len] int32, or [batch]. Position of each token in its sequence.
      cu_q_lens: [batch + 1] int32, which of the tokens [tokens] belong to which sequence, as for
        `jax_mla.append`.
      layer: which layer of a stacked pool.
      packs: whether the pages of the pool are cut into packs.
      page_begin: global id of the pool's first page.
      kv_format: name of the format in which the cache is stored; see `reference.encode_rows`. None
        for the dtype of the pool.
      kv_scale: scale of the cache, or a tuple of those of ckv and kpe; each one number.

    Returns:
      The cache with the new tokens, in the form of kv_pages.
    """
    pools = [jnp.asarray(pool) for pool in as_pools("jax_mla.reference.append", kv_pages)]
    for pool in pools:
        _checks.rank_of_pool(
            "jax_mla.reference.append", "kv_pages", pool, has_layer=layer is not None, packs=packs
        )
    page_table, positions = jnp.asarray(page_table), jnp.asarray(positions)
    if cu_q_lens is not None:  # each token becomes a sequence of its own
        num_tokens = ckv.shape[0]
        bounds = _ragged.bounds(jnp.asarray(cu_q_lens), None, num_tokens)
        sequence = _ragged.sequence_of_tokens(bounds, num_tokens)
        page_table = page_table[jnp.maximum(sequence, 0)]
        positions = jnp.where(sequence >= 0, positions, -1)
    if ckv.ndim == 2:
        ckv, positions = ckv[:, None], positions[:, None]
        kpe = None if kpe is None else kpe[:, None]
    rows = _quantization.encode_rows(ckv, kpe, kv_format, kv_scale, [pool.dtype for pool in pools])
    num_layers, num_pages, page_size = pool_sizes(pools[0], layer is not None)
    max_pages = page_table.shape[1]

    place = jnp.clip(positions // page_size, 0, max_pages - 1)
    page = jnp.take_along_axis(page_table, place, axis=1)  # [batch, q_len]
    local, owned = local_pages(page, page_begin, num_pages)
    owned &= (positions >= 0) & (positions // page_size < max_pages)
    # A write past the pool is dropped.
    page = jnp.where(owned, local, num_pages)
    slot = jnp.where(owned, positions % page_size, 0)
    where: tuple[Array, ...] = (page, slot)
    if pools[0].ndim - (layer is not None) == 4:
        pack = pools[0].shape[-2]
        where = (page, slot // pack, slot % pack)
    if layer is not None:
        which = jnp.clip(layer, -1, num_layers).reshape(())
        # JAX would count a negative layer from the end; here it is outside the pool.
        which = jnp.where(which < 0, num_layers, which).astype(jnp.int32)
        where = (which, *where)
    # The rest of a wider row is not written.
    new_pools = [
        _quantization.from_bytes(
            _quantization.as_bytes(pool)
            .at[(*where, slice(new.shape[-1]))]
            .set(_quantization.as_bytes(new), mode="drop"),
            pool.dtype,
        )
        for pool, new in zip(pools, rows, strict=True)
    ]
    return like(kv_pages, new_pools)

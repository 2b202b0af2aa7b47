"""The definition of index_append in jax.numpy, which specifies what every backend does."""

from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
from jax import Array, lax

from jax_mla.kv_cache import local_pages, pool_sizes
from jax_mla.ops import _checks, _eager, _index, _ragged

OP = "jax_mla.reference.index_append"


@_eager.definition
def index_append(
    index_pages: Array,
    k: Annotated[Array, "[batch, q_len, d], [batch, d] or [tokens, d]"],
    page_table: Annotated[Array, "[batch, max_pages_per_seq] int32"],
    positions: Annotated[Array, "[batch, q_len], [batch] or [tokens] int32"],
    *,
    cu_q_lens: Annotated[Array, "[batch + 1] int32"] | None = None,
    layer: Array | int | None = None,
    power_of_two_scales: bool = True,
    page_begin: Array | int = 0,
) -> Array:
    """Write new index keys into their pool, by definition.

    Token i of sequence b, at position p = positions[b, i], goes to row p % page_size of page
    page_table[b, p // page_size]. It is skipped if p is negative or past the page table, or if the
    pool or the layer does not have the page. If two tokens go to the same row, either may win.

    Args:
      index_pages: the pool, as for `jax_mla.index_append`.
      k: [batch, q_len, d], or [batch, d] for q_len 1, normalised and rotated already.
      page_table: [batch, max_pages_per_seq] int32, global page ids.
      positions: [batch, q_len] int32, or [batch]. Place of each token in its sequence.
      cu_q_lens: [batch + 1] int32, which of the tokens [tokens] belong to which sequence, as for
        `jax_mla.append`.
      layer: which layer of a stacked pool.
      power_of_two_scales: how keys in FP8 are encoded, see `reference.encode_index_keys`.
      page_begin: global id of the pool's first page.

    Returns:
      The pool with the new keys.
    """
    _checks.rank(OP, "index_pages", index_pages, (3 + (layer is not None),), _index.POOL_DIMS)
    page_table, positions = jnp.asarray(page_table), jnp.asarray(positions)
    if cu_q_lens is not None:  # each token becomes a sequence of its own
        bounds = _ragged.bounds(jnp.asarray(cu_q_lens), None, k.shape[0])
        sequence = _ragged.sequence_of_tokens(bounds, k.shape[0])
        page_table = page_table[jnp.maximum(sequence, 0)]
        positions = jnp.where(sequence >= 0, positions, -1)
    if k.ndim == 2:
        k, positions = k[:, None], positions[:, None]
    num_layers, num_pages, page_size = pool_sizes(index_pages, layer is not None)
    max_pages = page_table.shape[1]
    place = jnp.clip(positions // page_size, 0, max_pages - 1)
    page = jnp.take_along_axis(page_table, place, axis=1)  # [batch, q_len]
    local, owned = local_pages(page, page_begin, num_pages)
    owned &= (positions >= 0) & (positions // page_size < max_pages)
    page = jnp.where(owned, local, num_pages)  # a write past the pool is dropped
    row = jnp.where(owned, positions % page_size, 0)
    where: tuple[Array, ...] = (page, row)
    values = k.astype(index_pages.dtype)
    if _index.is_fp8(index_pages):
        codes, scales = _index.encode_index_keys(k, power_of_two_scales=power_of_two_scales)
        parts = [lax.bitcast_convert_type(x, jnp.uint8) for x in (codes, scales)]
        values = jnp.concatenate(parts, axis=-1)
        byte = _bytes_of_key(row, page_size)
        where = (page[..., None], byte // _index.FP8_WIDTH, byte % _index.FP8_WIDTH)
    if layer is not None:
        which = jnp.clip(layer, -1, num_layers).reshape(())
        # JAX would count a negative layer from the end; here it is outside the pool.
        where = (jnp.where(which < 0, num_layers, which).astype(jnp.int32), *where)
    return index_pages.at[where].set(values, mode="drop")


def _bytes_of_key(row: Array, page_size: int) -> Array:
    """Return where the codes and the scale of a row lie in its page, [*rows, 132] int32."""
    row = row[..., None]
    place = lax.broadcasted_iota(jnp.int32, (*row.shape[:-1], _index.FP8_WIDTH), row.ndim - 1)
    of_scale = page_size * _index.FP8_DIM + row * _index.SCALE_BYTES + place - _index.FP8_DIM
    return jnp.where(place < _index.FP8_DIM, row * _index.FP8_DIM + place, of_scale)

"""The public function `check_values`: checks of what only the device knows."""

from __future__ import annotations

import math
from typing import Annotated

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import checkify

from jax_mla.kv_cache import KvPages, PoolSizes, as_pools, pool_sizes
from jax_mla.ops import _checks

OP = "jax_mla.check_values"


def check_values(
    kv_pages: KvPages,
    page_table: Annotated[Array, "[batch, max_pages_per_seq] int32"],
    *,
    seq_lens: Annotated[Array, "[batch] int32"] | None = None,
    positions: Annotated[Array, "[batch, q_len] or [batch] int32"] | None = None,
    layer: Array | int | None = None,
) -> None:
    """Check the values in the arguments of `decode` and `append`, for the debug mode of an engine.

    The ops read device values without checking them: they clamp a length, skip a token, and treat
    a wild page as absent. This function finds such values. Pass `seq_lens` to check a call of
    `decode`, `positions` to check a call of `append`. It looks for

    * lengths outside [0, max_pages_per_seq * page_size],
    * positions past the page table (a negative position is legal and skips the token),
    * page ids outside the pool, in the places of the table that the call uses,
    * two tokens that `append` would write to the same row of the cache,
    * a layer outside [0, num_layers).

    Outside `jit` a bad value raises at once, and the host waits for the arrays. Under `jit` the
    check needs `jax.experimental.checkify`:

        def step(pool, ...):
            if debug:
                jax_mla.check_values(pool, page_table, positions=positions, layer=layer)
            pool = jax_mla.append(pool, ckv, kpe, page_table, positions, layer=layer)
            ...

        step = jax.jit(checkify.checkify(step) if debug else step)

    A checkified function returns (error, result), and `error.throw()` raises. Page ids are global:
    call the function with the whole pool, not on the parts that a `shard_map` sees. With local
    pages (`MeshAxes`) call it for each group, with its part of the pool and its sequences.

    Args:
      kv_pages: the cache, as for `decode`; only its shape is used.
      page_table: [batch, max_pages_per_seq] int32.
      seq_lens: [batch] int32, as for `decode`.
      positions: [batch, q_len] int32 or [batch], as for `append`.
      layer: which layer of a stacked pool, as for both.

    Raises:
      ValueError: a value is bad; the message says where. Or the shapes do not fit, or neither
        seq_lens nor positions is given.
      TypeError: an argument has the wrong type or dtype.
    """
    pool = _checks.array(OP, "kv_pages", as_pools(OP, kv_pages)[0])
    _checks.rank_of_pool(OP, "kv_pages", pool, layer is not None)
    sizes = pool_sizes(pool, layer is not None)
    page_table = _checks.array(OP, "page_table", page_table, _checks.INDICES)
    _checks.dtype(OP, "page_table", page_table, _checks.INDICES)
    _checks.shape(OP, "page_table", page_table, (None, None))
    if seq_lens is None and positions is None:
        raise ValueError(f"{OP}: seq_lens, positions: expected at least one of them, got None")
    if layer is not None:
        _check_layer(layer, sizes.num_layers)
    batch = page_table.shape[0]
    if seq_lens is not None:
        seq_lens = _checks.array(OP, "seq_lens", seq_lens, _checks.INDICES)
        _checks.dtype(OP, "seq_lens", seq_lens, _checks.INDICES)
        _checks.shape(OP, "seq_lens", seq_lens, (batch,), " with page_table's batch")
        _check_lengths(seq_lens, page_table, sizes)
    if positions is not None:
        positions = _checks.array(OP, "positions", positions, _checks.INDICES)
        _checks.dtype(OP, "positions", positions, _checks.INDICES)
        _checks.rank(OP, "positions", positions, (1, 2), "[batch, q_len] or [batch]")
        shape = (batch, *positions.shape[1:])
        _checks.shape(OP, "positions", positions, shape, " with page_table's batch")
        _check_positions(positions.reshape(batch, -1), page_table, sizes)


def _refuse(bad: Array, message: str, **values: Array) -> None:
    """Raise if any item of `bad` is true.

    Args:
      bad: any shape.
      message: format string over `values`.
      **values: arrays of the shape of `bad`; the message shows each at the first bad item.
    """
    first = jnp.argmax(bad.reshape(-1))
    shown = {name: x.reshape(-1)[first] for name, x in values.items()}
    checkify.check(~jnp.any(bad), f"{OP}: {message}", **shown)  # type: ignore[arg-type]


def _check_layer(layer: Array | int, num_layers: int) -> None:
    index = _checks.index(OP, "layer", layer, num_layers)
    if isinstance(index, Array):
        bad = (index < 0) | (index >= num_layers)
        _refuse(bad, f"layer: expected an index in [0, {num_layers}), got {{got}}", got=index)


def _check_lengths(seq_lens: Array, page_table: Array, sizes: PoolSizes) -> None:
    _, num_pages, page_size = sizes
    batch, max_pages = page_table.shape
    sequence = jnp.arange(batch)
    _refuse(
        (seq_lens < 0) | (seq_lens > max_pages * page_size),
        f"seq_lens: expected lengths that fit page_table in [0, {max_pages * page_size}], got "
        "{got} for sequence {sequence}",
        got=seq_lens,
        sequence=sequence,
    )
    place = lax.broadcasted_iota(jnp.int32, page_table.shape, 1)
    used = place * page_size < seq_lens[:, None]
    _refuse(
        used & ((page_table < 0) | (page_table >= num_pages)),
        f"page_table: expected page ids in [0, {num_pages}) within the lengths, got {{got}} at "
        "place {place} of sequence {sequence}",
        got=page_table,
        place=place,
        sequence=jnp.broadcast_to(sequence[:, None], page_table.shape),
    )


def _check_positions(positions: Array, page_table: Array, sizes: PoolSizes) -> None:
    _, num_pages, page_size = sizes
    max_pages = page_table.shape[1]
    capacity = max_pages * page_size
    sequence = lax.broadcasted_iota(jnp.int32, positions.shape, 0)
    _refuse(
        positions >= capacity,
        f"positions: expected places that page_table has, below {capacity}, got {{got}} for "
        "sequence {sequence}",
        got=positions,
        sequence=sequence,
    )
    place = positions // page_size
    is_written = (positions >= 0) & (positions < capacity)
    page = jnp.take_along_axis(page_table, jnp.clip(place, 0, max_pages - 1), axis=1)
    _refuse(
        is_written & ((page < 0) | (page >= num_pages)),
        f"page_table: expected page ids in [0, {num_pages}) where tokens are written, got {{got}} "
        "at place {place} of sequence {sequence}",
        got=page,
        place=place,
        sequence=sequence,
    )
    # Tokens for the same row become neighbours; skipped tokens get rows of their own.
    num_tokens = math.prod(positions.shape)
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    page = jnp.where(is_written, page, num_pages).reshape(-1)
    row = jnp.where(is_written.reshape(-1), positions.reshape(-1) % page_size, token)
    page, row, sequence = lax.sort((page, row, sequence.reshape(-1)), num_keys=2)
    if num_tokens > 1:
        _refuse(
            (page[1:] == page[:-1]) & (row[1:] == row[:-1]),
            "positions: expected every token at a row of its own, got row {row} of page {page} "
            "for two tokens, of sequences {first} and {second}",
            row=row[1:],
            page=page[1:],
            first=sequence[:-1],
            second=sequence[1:],
        )

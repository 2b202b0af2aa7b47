"""What the ops that write new rows share: groups of calls, and tokens split over devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla._mesh import _sharding

Named = TypeVar("Named", bound=NamedTuple)


class TokenFactors(NamedTuple):
    """Factors of the dimensions of sequences and tokens; see `_sharding.py`.

    Attributes:
      seqs: [*groups, batch].
      tokens: [*groups, *tokens]; *tokens is batch, q_len or, in a ragged call, tokens.
      bounds: [*groups, batch + 1]; None in a uniform call.
    """

    seqs: list[str]
    tokens: list[str]
    bounds: list[str] | None


def token_factors(groups: list[str], *, is_ragged: bool, has_local_pages: bool) -> TokenFactors:
    """Name the dimensions of sequences and tokens.

    The batch has the factor `rows`: every device gets all new rows and writes those whose page it
    owns. The tokens of a ragged call are not split, because no dimension of theirs goes with the
    sequences, unless each group of sequences has its own tokens and its own pages.
    """

    def factor(name: str) -> list[str]:
        is_whole = is_ragged and not has_local_pages
        return [*groups, f"whole_{name}" if is_whole else _sharding.ROWS]

    tokens = factor("tokens") if is_ragged else [*factor("tokens"), "whole_qlen"]
    return TokenFactors(factor("seqs"), tokens, factor("bounds") if is_ragged else None)


def with_all_groups(operands: Named, shared: Collection[str], groups: tuple[int, ...]) -> Named:
    """Return operands whose shared ones, which may have size 1 in a group, have its size, too.

    Args:
      operands: a named tuple of arrays and None.
      shared: names of operands.
      groups: sizes of the groups, the first dimensions of every operand.
    """
    given = {name: getattr(operands, name) for name in shared if groups}
    return operands._replace(
        **{
            name: jnp.broadcast_to(x, (*groups, *x.shape[len(groups) :]))
            for name, x in given.items()
            if x is not None
        }
    )


def exchange(
    rows: Sequence[jax.Array],
    page_table: jax.Array,
    positions: jax.Array,
    page_size: int,
    axes: _sharding.Axes,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Give every device the new rows of the whole batch: one all-gather of the rows and slots.

    Each device first looks up the slots of its own sequences. So the page table, which is far
    larger than the new rows if sequences are long, stays where it is.

    Args:
      rows: the parts of the new rows, each [*groups, batch, q_len, width], all of one dtype.
      page_table: [*groups, batch, max_pages_per_seq] int32.
      positions: [*groups, batch, q_len] int32.
      page_size: tokens in a page.
      axes: mesh axes over which the batch is split.

    Returns:
      The parts of all rows, and a page table and positions for them: the table has one page for
      each token, and token i's page is its entry i.
    """
    max_pages, dtype = page_table.shape[-1], rows[0].dtype
    place = positions // page_size
    valid = (positions >= 0) & (place < max_pages)
    page = jnp.take_along_axis(page_table, jnp.clip(place, 0, max_pages - 1), axis=-1)
    token = lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim - 1)
    slot = jnp.where(valid, token * page_size + positions % page_size, -1)

    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[dtype.itemsize]
    index = lax.bitcast_convert_type(jnp.stack([page, slot], axis=-1), bits)
    index = index.reshape(*page.shape, -1)
    parts = [lax.bitcast_convert_type(x, bits) for x in rows]
    packed = jnp.concatenate([*parts, index], axis=-1)
    packed = lax.all_gather(packed, axes, axis=packed.ndim - 3, tiled=True)

    ends = [sum(x.shape[-1] for x in rows[: i + 1]) for i in range(len(rows))]
    *parts, index = jnp.split(packed, ends, axis=-1)
    if bits != jnp.uint32:
        index = index.reshape(*index.shape[:-1], 2, -1)
    index = lax.bitcast_convert_type(index, jnp.int32)
    new_rows = [lax.bitcast_convert_type(x, dtype) for x in parts]
    return new_rows, index[..., 0], index[..., 1]

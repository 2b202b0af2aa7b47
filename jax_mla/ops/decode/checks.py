"""Argument checks that `decode` and `ragged_paged_attention` share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_mla.kv_cache import KvFormat, Shaped, pool_sizes
from jax_mla.ops import _checks

# The kernels multiply the scale by log2(e), and the product must be finite.
MAX_SCALE = float(np.finfo(np.float32).max) * math.log(2)


def query(
    op: str,
    q_nope: Shaped,
    q_pe: Shaped,
    ranks: Sequence[int],
    dims: str,
    fmt: KvFormat | None = None,
) -> None:
    """Check the two parts of the query; `dims` names the dimensions of q_nope."""
    _checks.rank(op, "q_nope", q_nope, ranks, dims)
    is_fp8 = fmt is not None and fmt.is_quantized
    _checks.numbers(op, "q_nope", q_nope, takes_codes=is_fp8)
    _checks.shape(op, "q_pe", q_pe, (*q_nope.shape[:-1], None), " as in q_nope")
    _checks.dtype(op, "q_pe", q_pe, (_checks.dtype_name(q_nope.dtype),), " as in q_nope")


def cache(
    op: str,
    q_nope: Shaped,
    q_pe: Shaped,
    pools: Sequence[Shaped],
    page_table: Shaped,
    *,
    has_layer: bool,
    packs: bool,
    fmt: KvFormat | None = None,
    table: str = "page_table",
    entry_tokens: int | None = None,
) -> None:
    """Check the pools and the table, whose rank is right, against the query.

    Args:
      op: name of the calling op.
      q_nope: the query.
      q_pe: its rotary part.
      pools: the pools.
      page_table: the page table, or a list of slots for each query.
      has_layer: whether the pools are stacked.
      packs: whether their pages are cut into packs.
      fmt: the format of the cache.
      table: name of the argument that is the table.
      entry_tokens: tokens that an entry of the table stands for; None for those of a page.
    """
    _checks.dtype(op, table, page_table, _checks.INDICES)
    d_ckv, d_kpe = q_nope.shape[-1], q_pe.shape[-1]
    _checks.widths(op, "q_nope, q_pe", d_ckv, d_kpe)
    _checks.pools(
        op, pools, d_ckv, d_kpe, q_nope.dtype, "q_nope", has_layer=has_layer, packs=packs, fmt=fmt
    )
    entry_tokens = entry_tokens or pool_sizes(pools[0], has_layer).page_size
    _checks.capacity(op, table, page_table, entry_tokens)
    if 0 in (*q_nope.shape, *q_pe.shape, *page_table.shape):
        raise ValueError(
            f"{op}: q_nope, q_pe, {table}: expected no dimension of size 0, got "
            f"{q_nope.shape}, {q_pe.shape}, {page_table.shape}"
        )


def query_scale(op: str, q_nope: Shaped, x: Any) -> tuple[float | jax.Array] | None:
    """Return the scale of the queries in a tuple; None if they are not e4m3."""
    is_e4m3 = _checks.dtype_name(q_nope.dtype) == _checks.E4M3
    if x is None and not is_e4m3:
        return None
    if not is_e4m3:
        raise ValueError(f"{op}: q_scale: expected None for queries in {q_nope.dtype}, got a scale")
    if x is None:
        raise ValueError(f"{op}: q_scale: expected a scale for queries in {q_nope.dtype}, got None")
    return (_checks.scale(op, "q_scale", x),)


def dtype_of_call(q_nope: Shaped) -> str:
    """Return the dtype in which a call computes: bfloat16, if its queries are codes."""
    name = _checks.dtype_name(q_nope.dtype)
    return "bfloat16" if name == _checks.E4M3 else name


def as_numbers(q: jax.Array) -> jax.Array:
    """Return queries in e4m3 as bfloat16, which holds every code exactly; others as they are."""
    return q.astype(dtype_of_call(q))


def scale(op: str, sm_scale: float) -> float:
    """Return the factor on the scores as a float that float32 holds."""
    value = _checks.number(op, "sm_scale", sm_scale)
    if not abs(value) <= MAX_SCALE:
        raise ValueError(
            f"{op}: sm_scale: expected a number between -{MAX_SCALE:.3g} and {MAX_SCALE:.3g}, got "
            f"{value}"
        )
    return value


def max_seq_len(op: str, bound: int | None, capacity: Any) -> int:
    """Return the caller's bound of the lengths; 0 if there is none.

    Args:
      op: name of the calling op, for messages.
      bound: the argument max_seq_len.
      capacity: tokens for which the page table has places. A bound that is not below it says
        nothing, and must not make another program.
    """
    if bound is None:
        return 0
    bound = _checks.integer(op, "max_seq_len", bound, expected="None or an int")
    if bound < 1:
        raise ValueError(f"{op}: max_seq_len: expected None or an int of at least 1, got {bound}")
    if bound >= (capacity if isinstance(capacity, int) else _checks.MAX_TOKENS_PER_SEQ):
        return 0
    return bound


def splits(op: str, num_splits: int | None) -> int:
    """Return the largest number of parts of a sequence; 0 for None."""
    if num_splits is None:
        return 0
    number = _checks.integer(op, "num_splits", num_splits)
    if not 1 <= number < 2**31:
        raise ValueError(f"{op}: num_splits: expected None or an int in [1, 2^31), got {number}")
    return number

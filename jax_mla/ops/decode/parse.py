"""Parses the arguments that `decode`, `ragged_paged_attention` and `sparse_attention` share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from jax_mla._runtime import _backends
from jax_mla.kv_cache import (
    KvFormat,
    KvPages,
    KvScale,
    Scale,
    Shaped,
    as_pools,
    bound_of_lengths,
    find_format,
    pool_sizes,
    stored_format,
    width,
)
from jax_mla.ops import _checks, _sink
from jax_mla.ops.decode import checks
from jax_mla.ops.decode.primitive import Operands, Params


@dataclasses.dataclass(frozen=True)
class Form:
    """How the arguments of the ops differ.

    Attributes:
      op: name of the op, for messages.
      query_ranks: ranks that q_nope may have.
      query_dims: its dimensions, for messages.
      table: name of the argument that says where the keys of a query lie.
      check_table: (op, q_nope, table) -> None, refuses a table whose shape does not fit the query.
      entry_tokens: tokens that an entry of the table stands for; None for those of a page.
    """

    op: str
    query_ranks: tuple[int, ...]
    query_dims: str
    table: str
    check_table: Callable[[str, Any, Any], None]
    entry_tokens: int | None = None


# Most eager calls are like the one before, and then get the same object, which compares at once.
_params = functools.lru_cache(maxsize=1024, typed=True)(Params)


def attention(
    form: Form,
    q_nope: Any,
    q_pe: Any,
    kv_pages: KvPages,
    table: Any,
    *,
    rows: tuple[Any, Any] | None = None,
    sm_scale: float,
    sink: Array | None,
    layer: Array | int | None,
    packs: bool,
    kv_format: str | None,
    kv_scale: KvScale | None,
    q_scale: Scale | None,
    batch_invariant: bool,
    page_begin: Array | int | None,
    backend: str | None,
    causal: bool = True,
    num_splits: int | None = None,
    max_seq_len: int | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Operands, Params, Array | None]:
    """Check the arguments, which are as the caller gave them.

    Args:
      form: what is specific to the op.
      q_nope: the query.
      q_pe: its rotary part; None if rows have none.
      kv_pages: the cache.
      table: the page table, or what an op has instead.
      rows: ckv and kpe, new rows; None for none.
      sm_scale: this and the others are the arguments of these names.
      sink: [num_heads].
      layer: which layer.
      packs: whether pages are cut into packs.
      kv_format: name of the format.
      kv_scale: scale of the cache.
      q_scale: scale of the queries.
      batch_invariant: whether results must not depend on other sequences.
      page_begin: global id of the first page.
      backend: name of the backend.
      causal: whether the mask is causal.
      num_splits: the most parts of a sequence.
      max_seq_len: bound of the lengths.
      sliding_window: the most tokens that a query sees.
      soft_cap: limit of the scores.

    Returns:
      The operands that are known at this point, with scalars as `_eager` takes them and seq_lens
      None; the parameters; the sink as an array.
    """
    op, has_layer = form.op, layer is not None
    if rows is not None:
        _checks.absent_together(op, q_pe=q_pe, kpe=rows[1])
        rows = _checks.array(op, "ckv", rows[0]), _checks.array_or_none(op, "kpe", rows[1])
    q_nope, q_pe = _checks.array(op, "q_nope", q_nope), _checks.array_or_none(op, "q_pe", q_pe)
    table = _checks.array(op, form.table, table, _checks.INDICES)
    pools = tuple(_checks.array(op, "kv_pages", pool) for pool in as_pools(op, kv_pages))
    fmt = find_format(op, kv_format)
    capacity = check(
        form, q_nope, q_pe, pools, table, rows=rows, has_layer=has_layer, packs=packs, fmt=fmt
    )
    if has_layer:
        layer = _checks.index(op, "layer", layer, pool_sizes(pools[0], has_layer).num_layers)
    ckv, kpe = rows or (None, None)
    operands = Operands(
        q_nope=q_nope,
        q_pe=q_pe,
        page_table=table,
        seq_lens=None,
        layer=layer,
        page_begin=_checks.index(op, "page_begin", page_begin, 2**31),
        kv_scale=_checks.kv_scale(op, fmt, kv_scale, pools, width(q_pe)),
        q_scale=checks.query_scale(op, q_nope, q_scale),
        ckv=ckv,
        kpe=kpe,
        kv_pages=pools,
    )
    max_seq_len = checks.max_seq_len(op, max_seq_len, capacity)
    bound = bound_of_lengths(capacity, max_seq_len)
    params = _params(
        sm_scale=checks.scale(op, sm_scale),
        backend=_backends.check_name(op, backend),
        has_layer=has_layer,
        causal=_checks.flag(op, "causal", causal),
        num_splits=checks.splits(op, num_splits),
        batch_invariant=_checks.flag(op, "batch_invariant", batch_invariant),
        max_seq_len=max_seq_len,
        sliding_window=checks.sliding_window(op, sliding_window, bound),
        soft_cap=checks.soft_cap(op, soft_cap),
        kv_format=stored_format(fmt, pools),
    )
    return operands, params, _sink.check(op, sink, q_nope.shape[-2])


def check(
    form: Form,
    q_nope: Shaped,
    q_pe: Shaped | None,
    pools: Sequence[Shaped],
    table: Shaped,
    *,
    rows: tuple[Array, Array | None] | None = None,
    has_layer: bool,
    packs: bool,
    fmt: KvFormat | None,
) -> Any:
    """Check the shapes and dtypes of the arrays against each other.

    Returns:
      How many tokens of a sequence the table has places for.
    """
    op = form.op
    _checks.rank(op, "q_nope", q_nope, form.query_ranks, form.query_dims)
    is_fp8 = fmt is not None and fmt.is_quantized
    _checks.numbers(op, "q_nope", q_nope, takes_codes=is_fp8)
    if q_pe is not None:
        _checks.shape(op, "q_pe", q_pe, (*q_nope.shape[:-1], None), " as in q_nope")
        _checks.dtype(op, "q_pe", q_pe, (_checks.dtype_name(q_nope.dtype),), " as in q_nope")
        _checks.rotary_part(op, "q_pe", q_pe)
    d_ckv, d_kpe = q_nope.shape[-1], width(q_pe)
    _checks.widths(op, "q_nope, q_pe", d_ckv, d_kpe)
    if rows is not None:
        _check_rows(op, q_nope, q_pe, *rows, takes_codes=_checks.takes_codes(fmt, pools))
    form.check_table(op, q_nope, table)
    _checks.dtype(op, form.table, table, _checks.INDICES)
    _checks.pools(
        op, pools, d_ckv, d_kpe, q_nope.dtype, "q_nope", has_layer=has_layer, packs=packs, fmt=fmt
    )
    entry_tokens = form.entry_tokens or pool_sizes(pools[0], has_layer).page_size
    capacity = _checks.capacity(op, form.table, table, entry_tokens)
    if 0 in (*q_nope.shape, *table.shape):
        raise ValueError(
            f"{op}: q_nope, {form.table}: expected no dimension of size 0, got {q_nope.shape}, "
            f"{table.shape}"
        )
    return capacity


def _check_rows(
    op: str,
    q_nope: Shaped,
    q_pe: Shaped | None,
    ckv: Array,
    kpe: Array | None,
    *,
    takes_codes: bool,
) -> None:
    """Check the new rows of the tokens of the query."""
    _checks.rank(op, "ckv", ckv, (2,), "[tokens, d_ckv]")
    if q_nope.shape[-1] != ckv.shape[-1]:
        raise ValueError(
            f"{op}: q_nope: expected the width of ckv, {ckv.shape[-1]}, which a query has once it "
            f"was multiplied by W_UK, got {q_nope.shape[-1]}"
        )
    for name, x, like, query in (("ckv", ckv, "q_nope", q_nope), ("kpe", kpe, "q_pe", q_pe)):
        if x is not None and query is not None:
            _checks.shape(op, name, x, (query.shape[0], query.shape[2]), f" as in {like}")
    dtype = checks.dtype_of_call(q_nope)
    codes = (_checks.E4M3,) if takes_codes else ()
    is_as_query = dtype == _checks.dtype_name(q_nope.dtype) and not codes
    _checks.dtype(op, "ckv", ckv, (dtype, *codes), " as in q_nope" if is_as_query else "")
    if kpe is not None:
        _checks.dtype(op, "kpe", kpe, (_checks.dtype_name(ckv.dtype),), " as in ckv")

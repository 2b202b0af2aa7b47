"""Argument checks that `prefill` and `mixed_attention` share."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array
from jax.sharding import AxisType

from jax_mla._mesh import _dispatch
from jax_mla._runtime import _backends
from jax_mla.kv_cache import KvPages, KvScale, as_pools, find_format, pool_sizes, width
from jax_mla.ops import _checks, _eager
from jax_mla.ops.prefill import operands as ops
from jax_mla.ops.prefill.operands import (
    CUDNN,
    IMPLEMENTATIONS,
    REFERENCE,
    SM90,
    SM90_OR_XLA,
    XLA,
)

MIN_SM_SCALE, MAX_SM_SCALE = 1e-30, 1e30  # float32 holds them, and a score times them


def tokens_and_weights(
    op: str, arrays: Sequence[Array | None], weight_arrays: Sequence[Array]
) -> tuple[ops.Tokens, ops.Weights]:
    """Return the new tokens and the up-projections.

    Args:
      op: name of the calling op, for messages.
      arrays: q_nope, q_pe, ckv, kpe, as the caller gave them.
      weight_arrays: w_uk, w_uv.
    """
    q_nope, q_pe, ckv, kpe = arrays
    _checks.absent_together(op, q_pe=q_pe, kpe=kpe)
    tokens = ops.Tokens(
        _checks.array(op, "q_nope", q_nope),
        _checks.array_or_none(op, "q_pe", q_pe),
        _checks.array(op, "ckv", ckv),
        _checks.array_or_none(op, "kpe", kpe),
    )
    weights = ops.Weights(
        *(_checks.array(op, n, x) for n, x in zip(ops.Weights._fields, weight_arrays, strict=True))
    )
    q_nope, q_pe, ckv, kpe = tokens
    _checks.rank(op, "q_nope", q_nope, (3,), "[tokens, num_heads, d_nope]")
    _checks.dtype(op, "q_nope", q_nope, _checks.FLOATS)
    num_tokens, num_heads, d_nope = q_nope.shape
    if q_pe is not None:
        _checks.shape(op, "q_pe", q_pe, (num_tokens, num_heads, None), " as in q_nope")
    _checks.shape(op, "ckv", ckv, (num_tokens, None), " with q_nope's tokens")
    if kpe is not None:
        _checks.shape(op, "kpe", kpe, (num_tokens, width(q_pe)), " as in ckv and q_pe")
    d_ckv = ckv.shape[-1]
    _checks.widths(op, "ckv, kpe", d_ckv, width(kpe))
    if d_nope == d_ckv and weights.w_uk.shape[-2:-1] not in ((), (d_ckv,)):
        raise ValueError(
            f"{op}: q_nope: expected d_nope = {weights.w_uk.shape[-2]} as in w_uk, the query as "
            f"the model makes it, got {d_nope}, the width of ckv, which a query has once it was "
            "multiplied by W_UK"
        )
    _checks.shape(op, "w_uk", weights.w_uk, (num_heads, d_nope, d_ckv), " of q_nope and ckv")
    _checks.shape(op, "w_uv", weights.w_uv, (num_heads, d_ckv, None), " of q_nope and ckv")
    like = (_checks.dtype_name(q_nope.dtype),)
    for name, x in {**tokens._asdict(), **weights._asdict()}.items():
        if x is None:
            continue
        _checks.dtype(op, name, x, like, " as in q_nope")
        if 0 in x.shape:
            raise ValueError(f"{op}: {name}: expected no dimension of size 0, got {x.shape}")
        _refuse_explicit_axes(op, name, x)
    return tokens, weights


def cache(
    op: str,
    tokens: ops.Tokens,
    kv_pages: KvPages,
    page_table: Array,
    seq_lens: Array,
    layer: Array | int | None,
    packs: bool,
    page_begin: Array | int | None,
    kv_format: str | None,
    kv_scale: KvScale | None,
) -> ops.Cache:
    """Return the cache and the place of each sequence in it; the arguments are those of `op`."""
    fmt = find_format(op, kv_format)
    page_table = _checks.array(op, "page_table", page_table, _checks.INDICES)
    seq_lens = _checks.array(op, "seq_lens", seq_lens, _checks.INDICES)
    pools = [_checks.array(op, "kv_pages", pool) for pool in as_pools(op, kv_pages)]
    _checks.rank(op, "page_table", page_table, (2,), "[seqs, max_pages_per_seq]")
    _checks.dtype(op, "page_table", page_table, _checks.INDICES)
    _checks.shape(op, "seq_lens", seq_lens, (page_table.shape[0],), " with page_table's seqs")
    _checks.dtype(op, "seq_lens", seq_lens, _checks.INDICES)
    if 0 in page_table.shape:
        raise ValueError(
            f"{op}: page_table: expected no dimension of size 0, got {page_table.shape}"
        )
    places = [("page_table", page_table), ("seq_lens", seq_lens)]
    for name, x in [*places, *(("kv_pages", pool) for pool in pools)]:
        _refuse_explicit_axes(op, name, x)
    d_ckv, d_kpe = tokens.ckv.shape[-1], width(tokens.kpe)
    dtype = tokens.q_nope.dtype
    has_layer = layer is not None
    _checks.pools(
        op, pools, d_ckv, d_kpe, dtype, "q_nope", has_layer=has_layer, packs=packs, fmt=fmt
    )
    num_layers = pool_sizes(pools[0], has_layer).num_layers
    layer = _checks.index(op, "layer", layer, num_layers)
    page_begin = _checks.index(op, "page_begin", page_begin, 2**31)
    scales = _checks.kv_scale(op, fmt, kv_scale, pools, d_kpe)
    return _eager.with_scalar_arrays(
        ops.Cache(tuple(pools), page_table, seq_lens, layer, page_begin, scales)
    )


def implementation(
    op: str,
    name: str | None,
    tokens: ops.Tokens,
    weights: ops.Weights,
    *,
    served: Sequence[str | None] = (None, *IMPLEMENTATIONS),
    has_masks: bool = False,
) -> str | None:
    """Return the implementation for `Params`.

    Args:
      op: name of the calling op, for messages.
      name: that of an implementation, or None for the best.
      tokens: the new tokens.
      weights: the up-projections.
      served: what the op takes.
      has_masks: whether the call has a sliding window or a soft cap.
    """
    if has_masks:
        served = [n for n in served if n not in (SM90, CUDNN)]
    if not isinstance(name, str | None) or name not in served:
        of_masks = " with a sliding window or a soft cap" if has_masks else ""
        names = ", ".join(map(repr, served))
        raise ValueError(f"{op}: implementation: expected one of {names}{of_masks}, got {name!r}")
    if has_masks and name is None:
        return XLA
    if name not in (None, SM90, REFERENCE):
        return name
    is_partly_manual = bool(auto_axes_of_manual_region(tokens, weights))
    if name is not None and is_partly_manual:
        raise ValueError(
            f"{op}: implementation: expected 'cudnn' or 'xla' in a region that is manual over some "
            f"mesh axes only, got {name!r}; make the others manual too"
        )
    if name == REFERENCE:
        return name
    why_not = _backends.why_no_prefill_kernel(
        dtype=_checks.dtype_name(tokens.q_nope.dtype),
        d_nope=tokens.q_nope.shape[-1],
        d_kpe=width(tokens.q_pe),
        d_v=weights.w_uv.shape[-1],
    )
    if name is None:
        return None if why_not or is_partly_manual else SM90_OR_XLA
    if why_not:
        raise ValueError(
            f"{op}: implementation: expected one that takes this call, got {name!r}: {why_not}"
        )
    return name


def auto_axes_of_manual_region(tokens: ops.Tokens, weights: ops.Weights) -> set[str]:
    """Return the mesh axes that are Auto in a region that is manual over others."""
    _, kinds = _dispatch.mesh_axes([jax.typeof(x) for x in jax.tree.leaves((tokens, weights))])
    return kinds[AxisType.Auto] if kinds[AxisType.Manual] else set()


def count(op: str, name: str, x: int) -> int:
    """Return a static number of tokens."""
    number = _checks.integer(op, name, x)
    if not 1 <= number < 2**30:
        raise ValueError(f"{op}: {name}: expected an int in [1, 2^30), got {number}")
    return number


def num_seqs_as_scalar(num_seqs: Array | int | None, tokens: ops.Tokens) -> Array | None:
    """Return a number of sequences, already checked, as a scalar."""
    return None if num_seqs is None else _eager.as_scalar(num_seqs, tokens.q_nope)


def scale(op: str, sm_scale: float) -> float:
    """Return the factor on the scores."""
    value = _checks.number(op, "sm_scale", sm_scale)
    if not MIN_SM_SCALE <= value <= MAX_SM_SCALE:
        raise ValueError(
            f"{op}: sm_scale: expected a positive number in [{MIN_SM_SCALE:.0e}, "
            f"{MAX_SM_SCALE:.0e}], got {value}"
        )
    return value


def _refuse_explicit_axes(op: str, name: str, x: Array) -> None:
    spec = jax.typeof(x).sharding.spec  # names Explicit axes only
    if any(spec):
        raise ValueError(
            f"{op}: {name}: expected an array that is sharded over Auto axes or in a manual "
            f"region, got one with {spec} on Explicit axes; call it in a shard_map"
        )

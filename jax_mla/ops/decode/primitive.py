"""The primitive behind `decode`, `ragged_paged_attention` and `sparse_attention`.

A call attends to the cache. With *new rows*, `ckv` and `kpe`, it first writes those into the cache:
it is append and decode in one, so this file uses both.

A plain *uniform* call has one batch dimension, of sequences, and each of them has q_len queries.
Every `vmap` adds one dimension more:

* of heads, if only the query is mapped: the cache is then read once, and new rows are written once;
* of batch otherwise, and of groups as well if the pools are mapped. Not with new rows: every mapped
  call would write a cache of its own.

Dimensions are folded only after the sharding is known, so a mapped axis that is sharded costs
nothing.

In a *ragged* call, which has new rows, the tokens of all sequences lie end to end, and `cu_q_lens`
says which belong to which sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import _primitive
from jax_mla._mesh import _sharding
from jax_mla._op import Factors, FfiCall, Op, PlanCall, pools_in_place
from jax_mla._runtime import _backends
from jax_mla.kv_cache import (
    as_pools,
    bound_of_lengths,
    fold_groups,
    format_name,
    has_packs,
    packed_width,
    pool_sizes,
    row_alignment,
    tokens_as_pages,
    width,
)
from jax_mla.ops import _ragged
from jax_mla.ops.append import primitive as append
from jax_mla.ops.append import transforms
from jax_mla.ops.decode import ragged_reference, reference, window
from jax_mla.ops.decode.owned_pages import shorten

NAME = "jax_mla.decode"
RAGGED_NAME = "jax_mla.ragged_paged_attention"


class Operands(NamedTuple):
    """The operands of a call, or one item for each of them.

    *tokens is *batch, q_len in a uniform call, and tokens in a ragged one. An operand that may be
    absent is then None. With new rows *batch is one dimension, seqs, and scalars have size 1.

    Attributes:
      q_nope: [*tokens, *heads, d_ckv].
      q_pe: [*tokens, *heads, d_kpe]; absent, like kpe, if the rows have no rotary part.
      page_table: [*batch, max_pages_per_seq] int32.
      seq_lens: [*batch] int32.
      layer: int32, as many dimensions as batch; each has size 1 or the batch's.
      page_begin: like `layer`.
      kv_scale: float32, `layer`'s dimensions and 2: of ckv and kpe; if the format has one.
      q_scale: float32, `layer`'s dimensions and 1; if the queries have one.
      ckv: [*tokens, d_ckv], new rows.
      kpe: [*tokens, d_kpe], with ckv.
      cu_q_lens: [seqs + 1] int32, or [seqs + groups] for groups with local pages; if ragged.
      num_seqs: [1] or [groups] int32; if ragged.
      norm_weight: [d_ckv] float32; otherwise ckv is written as it is.
      rope_table: [num_positions, d_kpe] float32; otherwise kpe and q_pe are taken as they are.
      rope_lens: [seqs] int32, with rope_table: the lengths by which tokens are rotated, which are
        `seq_lens`, of whole sequences where those are shortened.
      kv_pages: one pool or two, [*groups, (num_layers,) num_pages, *rows, width], see
        `kv_cache.pool_sizes`.
    """

    q_nope: Any
    q_pe: Any
    page_table: Any
    seq_lens: Any
    layer: Any
    page_begin: Any
    kv_scale: Any = None
    q_scale: Any = None
    ckv: Any = None
    kpe: Any = None
    cu_q_lens: Any = None
    num_seqs: Any = None
    norm_weight: Any = None
    rope_table: Any = None
    rope_lens: Any = None
    kv_pages: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Params:
    """The static parameters of a call.

    Attributes:
      sm_scale: factor on the scores.
      backend: the FFI attribute; "" chooses.
      has_layer: whether the pools are stacked.
      causal: whether the mask is causal; always with new rows.
      num_splits: at most this many parts a sequence; 0 chooses.
      batch_invariant: whether a sequence's result must not depend on the others.
      max_seq_len: bound of the lengths; 0 for the width of the page table.
      pool_dims: which batch dimensions the pools have too, as groups.
      kv_format: how the cache is stored, see `kv_cache.stored_format`.
      has_local_pages: whether page ids are local, so that the tokens, `cu_q_lens` and `num_seqs`
        of a ragged call have a part for each group.
      norm_eps: see `append.transforms.rms_norm`.
      rope_interleaved: see `append.transforms.rotate`.
      has_queries: whether the last batch dimension counts the queries of a sequence. No role of a
        mesh splits it.
      sliding_window: the most tokens that a query sees, its own and those before it; 0 for all.
      soft_cap: limit of the scores; 0 for none.
    """

    sm_scale: float
    backend: str
    has_layer: bool
    causal: bool = True
    num_splits: int = 0
    batch_invariant: bool = False
    max_seq_len: int = 0
    pool_dims: tuple[int, ...] = ()
    kv_format: str = ""
    has_local_pages: bool = False
    norm_eps: float = 0.0
    rope_interleaved: bool = False
    has_queries: bool = False
    sliding_window: int = 0
    soft_cap: float = 0.0


def results(types: Operands, params: Params) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of out and lse, and with new rows of the new pools."""
    del params
    q_nope = types.q_nope
    pools = [] if types.ckv is None else types.kv_pages
    return [
        jax.ShapeDtypeStruct(q_nope.shape, q_nope.dtype),
        jax.ShapeDtypeStruct(q_nope.shape[:-1], jnp.float32),
        *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools),
    ]


def _num_token_dims(operands: Operands) -> int:
    return operands.seq_lens.ndim + 1 if operands.cu_q_lens is None else 1


# ---- Sharding ----------------------------------------------------------------------------------


def _batch_and_token_factors(types: Operands, params: Params) -> tuple[list[str], list[str]]:
    """Name the dimensions *batch and *tokens.

    The tokens of a ragged call are not split, because no dimension of theirs goes with the
    sequences, unless each group of sequences has its own tokens and its own pages.
    """
    if types.cu_q_lens is not None:
        if params.has_local_pages:
            return [_sharding.BATCH], [_sharding.BATCH]
        return ["whole_seqs"], ["whole_tokens"]
    batch = [f"batch{i}" for i in range(types.seq_lens.ndim)]
    if params.has_queries:
        batch[-1] = "whole_queries"
    if types.ckv is not None:
        batch = [_sharding.BATCH]  # `exchange` brings the new rows of other sequences
    return batch, [*batch, "whole_qlen"]


def factors(types: Operands, params: Params) -> tuple[Operands, Factors]:
    """Name the dimensions that are split alike; see `_sharding.py`."""
    batch, tokens = _batch_and_token_factors(types, params)
    heads = [f"heads{i}" for i in range(types.q_nope.ndim - len(tokens) - 1)]
    query = [*tokens, *heads]
    groups = [batch[i] for i in params.pool_dims]
    pools = _sharding.pool_factors(groups, types.kv_pages, params.has_layer)
    is_split = _sharding.BATCH in tokens
    dims = {
        "q_nope": [*query, "whole_dckv"],
        "q_pe": [*query, "whole_dkpe"],
        "page_table": [*batch, "whole_maxpages"],
        "seq_lens": batch,
        "layer": _sharding.scalar_factors(batch, types.layer.shape, "layer"),
        "page_begin": _sharding.scalar_factors(batch, types.page_begin.shape, "pagebegin"),
        "kv_scale": _sharding.scale_factors(batch, types.kv_scale, "kvscale"),
        "q_scale": _sharding.scale_factors(batch, types.q_scale, "qscale"),
        "ckv": [*tokens, "whole_dckv"],
        "kpe": [*tokens, "whole_dkpe"],
        "cu_q_lens": [_sharding.BATCH if is_split else "whole_bounds"],
        "num_seqs": [_sharding.BATCH if is_split else "whole_numseqs"],
        "norm_weight": ["whole_norm"],
        "rope_table": ["whole_positions", "whole_angles"],
        "rope_lens": batch,
        "kv_pages": pools,
    }
    present = {name: d for name, d in dims.items() if getattr(types, name) is not None}
    out = [[*query, "whole_dckv"], query]
    return types._replace(**present), out if types.ckv is None else [*out, *pools]


def _bound_of_lengths(operands: Operands, params: Params) -> Any:
    pool = pool_sizes(operands.kv_pages[0], params.has_layer, len(params.pool_dims))
    return bound_of_lengths(operands.page_table.shape[-1] * pool.page_size, params.max_seq_len)


def _has_room(operands: Operands, params: Params) -> jax.Array:
    """Return for each sequence whether the call has room for its length; else it writes nothing."""
    seq_lens = operands.seq_lens
    return (seq_lens >= 0) & (seq_lens <= _bound_of_lengths(operands, params))


def keep_owned_pages(operands: Operands, params: Params) -> Operands:
    """Shorten every sequence to the pages that the pool holds, see `shorten`.

    Not with a sliding window, whose mask goes by the places of the tokens: `local` then shortens
    sequences to their windows, and kernels walk past the absent pages there.
    """
    if params.sliding_window:
        return operands
    page_table, seq_lens = operands.page_table, operands.seq_lens
    if operands.cu_q_lens is None:
        q_lens = operands.q_nope.shape[seq_lens.ndim]
    else:
        groups = operands.num_seqs.shape[0]
        bounds = _ragged.bounds(
            operands.cu_q_lens.reshape(groups, -1),
            operands.num_seqs[:, None],
            operands.q_nope.shape[0] // groups,
        )
        q_lens = (bounds[:, 1:] - bounds[:, :-1]).reshape(seq_lens.shape)
    pool = pool_sizes(operands.kv_pages[0], params.has_layer, len(params.pool_dims))
    bound = _bound_of_lengths(operands, params)
    table, lens = shorten(page_table, seq_lens, q_lens, operands.page_begin, pool, bound)
    if operands.ckv is not None:
        has_room = _has_room(operands, params)
        table = jnp.where(has_room[:, None], table, page_table)
        lens = jnp.where(has_room, lens, seq_lens)
    return operands._replace(page_table=table, seq_lens=lens)


def exchange(operands: Operands, params: Params, axes: _sharding.Axes) -> Operands:
    """Write the new rows of all sequences of a uniform call, by an all-gather of the rows.

    Each device attends for its own sequences, but it holds pages of the others' as well. It
    transforms its own rows before, so that a row has the same bits in all copies of a page.
    """
    operands = _transformed(operands, params)
    rows, how = _rows_of(operands, params)
    pools = append.bind_local(append.exchange(rows, how, axes), how)
    return operands._replace(kv_pages=tuple(pools))


def _rows_of(operands: Operands, params: Params) -> tuple[append.Operands, append.Params]:
    """Return the call of `append` that writes the new rows of a uniform call, transformed ones."""
    q_len = operands.q_nope.shape[1]
    first = jnp.where(_has_room(operands, params), operands.seq_lens - q_len, -q_len)
    positions = first[:, None] + jnp.arange(q_len, dtype=jnp.int32)[None]
    rows = append.Operands(
        ckv=operands.ckv,
        kpe=operands.kpe,
        page_table=operands.page_table,
        positions=positions,
        cu_q_lens=None,
        layer=operands.layer,
        page_begin=operands.page_begin,
        kv_scale=operands.kv_scale,
        norm_weight=None,
        rope_table=None,
        q_pe=None,
        kv_pages=operands.kv_pages,
    )
    is_reference = params.backend == _backends.REFERENCE
    how = append.Params(
        backend=_backends.REFERENCE if is_reference else "",
        has_layer=params.has_layer,
        kv_format=params.kv_format,
    )
    return rows, how


# ---- On one device -----------------------------------------------------------------------------


def local(
    op: str,
    bind: Callable[[Operands, Params], list[jax.Array]],
    operands: Operands,
    params: Params,
) -> list[jax.Array]:
    """Fold the batch, head and group dimensions of one device's blocks, and call the handler."""
    q_nope, q_pe, batch = operands.q_nope, operands.q_pe, operands.seq_lens.shape
    num_token_dims = _num_token_dims(operands)
    tokens, heads = q_nope.shape[:num_token_dims], q_nope.shape[num_token_dims:-1]
    pools, page_table, layer, page_begin = fold_groups(
        op,
        "kv_pages",
        operands.kv_pages,
        operands.page_table,
        operands.layer,
        operands.page_begin,
        params.pool_dims,
        params.has_layer,
    )
    folded = operands._replace(
        page_table=page_table,
        layer=layer,
        page_begin=page_begin,
        kv_scale=_fold_scale(operands.kv_scale, batch),
        q_scale=_fold_scale(operands.q_scale, batch),
        kv_pages=tuple(pools),
    )
    params = dataclasses.replace(params, pool_dims=())
    if len(batch) == 1 and len(heads) == 1:  # no products of symbolic dimensions
        return _bind_in_window(bind, folded, params)
    tokens = tokens if len(batch) == 1 else (math.prod(batch), tokens[-1])
    rows = (*tokens, math.prod(heads))
    folded = folded._replace(
        q_nope=q_nope.reshape(*rows, q_nope.shape[-1]),
        q_pe=None if q_pe is None else q_pe.reshape(*rows, q_pe.shape[-1]),
        seq_lens=operands.seq_lens.reshape(-1),
    )
    out, lse, *pools = _bind_in_window(bind, folded, params)
    return [out.reshape(q_nope.shape), lse.reshape(q_nope.shape[:-1]), *pools]


def _takes_slots(operands: Operands, params: Params) -> bool:
    """Whether a call with a window becomes one without, on pages of single tokens."""
    if not params.sliding_window or operands.cu_q_lens is not None or params.soft_cap:
        return False
    pool = pool_sizes(operands.kv_pages[0], params.has_layer)
    num_rows = pool.num_pages * pool.page_size
    fits = not isinstance(num_rows, int) or num_rows < 2**31  # slots are 32 bits
    return operands.q_nope.shape[1] == 1 and fits


def _bind_in_window(
    bind: Callable[[Operands, Params], list[jax.Array]], operands: Operands, params: Params
) -> list[jax.Array]:
    """Call the inner primitive; where slots take the place of pages, new rows are written first."""
    pools = []
    if operands.ckv is not None and _takes_slots(operands, params):
        operands = _transformed(operands, params)
        pools = append.bind_local(*_rows_of(operands, params))
        operands = operands._replace(kv_pages=tuple(pools), ckv=None, kpe=None)
    return [*bind(*_in_window(operands, params)), *pools]


def _in_window(operands: Operands, params: Params) -> tuple[Operands, Params]:
    """Shorten the sequences of a uniform call to what their queries see.

    In a ragged call the handler does it, for every unit of queries.
    """
    if not params.sliding_window or operands.cu_q_lens is not None:
        return operands, params
    bound = _bound_of_lengths(operands, params)
    if operands.ckv is not None and not isinstance(bound, int):
        return operands, params  # only on a CPU, whose kernel skips what is before the window
    q_len, pool = operands.q_nope.shape[1], pool_sizes(operands.kv_pages[0], params.has_layer)
    page_size = pool.page_size
    if operands.ckv is None and _takes_slots(operands, params):
        place = operands.page_table, operands.seq_lens, operands.page_begin
        table, lens = window.slots(*place, window=params.sliding_window, pool=pool, bound=bound)
        pools = (tokens_as_pages(pool, params.has_layer) for pool in operands.kv_pages)
        operands = operands._replace(
            page_table=table, seq_lens=lens, page_begin=jnp.zeros_like(operands.page_begin),
            kv_pages=tuple(pools),
        )  # fmt: skip
        return operands, dataclasses.replace(params, sliding_window=0, max_seq_len=0)
    short_bound = window.width(params.sliding_window, q_len, page_size, bound)
    if short_bound is None:
        return operands, params
    page_table, seq_lens = window.shorten(
        operands.page_table, operands.seq_lens,
        window=params.sliding_window, q_len=q_len, page_size=page_size, bound=bound,
        short_bound=short_bound,
    )  # fmt: skip
    operands = operands._replace(page_table=page_table, seq_lens=seq_lens)
    return operands, dataclasses.replace(params, max_seq_len=short_bound)


def types_in_window(types: Operands, params: Params) -> tuple[Operands, Params]:
    """Return what `_in_window` makes of operands of these types."""
    if not params.sliding_window:
        return types, params
    found = [params]

    def shorten(operands: Operands) -> Operands:
        operands, found[0] = _in_window(operands, params)
        return operands

    return jax.eval_shape(shorten, types), found[0]


def _fold_scale(scale: jax.Array | None, batch: tuple[Any, ...]) -> jax.Array | None:
    """Return one scale, or one for each sequence: [1 or num_sequences, n]."""
    if scale is None:
        return None
    width = scale.shape[-1]
    if all(size == 1 for size in scale.shape[:-1]):
        return scale.reshape(1, width)
    return jnp.broadcast_to(scale, (*batch, width)).reshape(-1, width)


def _rotation_positions(operands: Operands, params: Params) -> jax.Array:
    """Return for each token the position by which it is rotated, [*tokens] int32, any values."""
    lens = jnp.clip(operands.rope_lens, 0, _bound_of_lengths(operands, params))
    tokens = operands.ckv.shape[:-1]
    if operands.cu_q_lens is None:
        from_end = jnp.arange(-tokens[1], 0, dtype=jnp.int32)
        return lens[:, None] + from_end[None]
    bounds = _ragged.bounds(operands.cu_q_lens, operands.num_seqs[0], tokens[0])
    own = jnp.maximum(_ragged.sequence_of_tokens(bounds, tokens[0]), 0)
    return lens[own] - (bounds[own + 1] - jnp.arange(tokens[0], dtype=jnp.int32))


def _transformed(operands: Operands, params: Params) -> Operands:
    """Normalise ckv and rotate kpe and q_pe, so that the rest of the call only writes and reads."""
    ckv, kpe, q_pe = operands.ckv, operands.kpe, operands.q_pe
    if operands.norm_weight is not None:
        ckv = transforms.rms_norm(ckv, operands.norm_weight, params.norm_eps)
    if operands.rope_table is not None:
        positions = _rotation_positions(operands, params)
        folded = q_pe.reshape(*positions.shape, -1, q_pe.shape[-1])
        kpe, rotated = (
            transforms.rotate(
                x, operands.rope_table, positions, interleaved=params.rope_interleaved
            )
            for x in (kpe, folded)
        )
        q_pe = rotated.reshape(q_pe.shape)
    return operands._replace(
        ckv=ckv, kpe=kpe, q_pe=q_pe, norm_weight=None, rope_table=None, rope_lens=None
    )


def run_reference(operands: Operands, params: Params) -> list[jax.Array]:
    """Run the reference on the operands of the inner primitive."""
    pools = operands.kv_pages
    cache = pools[0] if len(pools) == 1 else (pools[0], pools[1])
    options: dict[str, Any] = {
        "sm_scale": params.sm_scale,
        "layer": operands.layer[0] if params.has_layer else None,
        "packs": has_packs(pools, params.has_layer),
        "return_lse": True,
        "max_seq_len": params.max_seq_len or None,
        "page_begin": operands.page_begin[0],
        "kv_format": format_name(params.kv_format),
        "kv_scale": reference.columns(operands.kv_scale),
        "q_scale": None if operands.q_scale is None else operands.q_scale[:, 0],
        "sliding_window": params.sliding_window or None,
        "soft_cap": params.soft_cap or None,
    }
    place = operands.page_table, operands.seq_lens
    if operands.ckv is None:
        query = operands.q_nope, operands.q_pe
        out, lse = reference.decode(*query, cache, *place, causal=params.causal, **options)
        return [out.astype(operands.q_nope.dtype), lse]
    shape, num_token_dims = operands.q_nope.shape, _num_token_dims(operands)
    operands = _transformed(operands, params)
    q_nope, q_pe, ckv, kpe = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[num_token_dims:]) if num_token_dims > 1 else x,
        (operands.q_nope, operands.q_pe, operands.ckv, operands.kpe),
    )
    num_seqs = None if operands.num_seqs is None else operands.num_seqs[0]
    out, *lses, new = ragged_reference.ragged_paged_attention(
        q_nope, q_pe, ckv, kpe, cache, *place, operands.cu_q_lens, num_seqs, **options
    )
    out = out.astype(q_nope.dtype)
    lse = lses[0].reshape(shape[:-1])
    return [out.reshape(shape), lse, *as_pools(RAGGED_NAME, new)]


# ---- Lowering ----------------------------------------------------------------------------------


def decode_call(types: Operands, params: Params) -> _backends.DecodeCall:
    """Return what backends judge a call by, from the types of the inner primitive's operands."""
    num_heads, d_ckv = types.q_nope.shape[-2:]
    return _backends.DecodeCall(
        dtype=jnp.dtype(types.q_nope.dtype).name,
        batch=types.page_table.shape[0],
        q_len=types.q_nope.shape[1] if types.cu_q_lens is None else 0,
        num_heads=num_heads,
        d_ckv=d_ckv,
        d_kpe=width(types.q_pe),
        page_size=pool_sizes(types.kv_pages[0], params.has_layer).page_size,
        max_pages_per_seq=types.page_table.shape[-1],
        num_splits=params.num_splits,
        batch_invariant=params.batch_invariant,
        max_seq_len=params.max_seq_len,
        row_alignment=row_alignment(types.kv_pages),
        kv_format=params.kv_format,
        packed_width=packed_width(types.kv_pages),
        sliding_window=params.sliding_window,
        has_soft_cap=params.soft_cap > 0,
    )


def ffi(op: str, platform: str, types: Operands, params: Params) -> FfiCall | None:
    """Choose the custom call for a platform; None means the reference.

    Args:
      op: name of the op, for messages.
      platform: JAX platform.
      types: types of the operands.
      params: static parameters.
    """
    if _backends.uses_reference(op, params.backend, platform):
        return None
    call = decode_call(types, params)
    _backends.require(platform, call, params.backend, op=op)
    has_rows, scratch, plan = types.ckv is not None, None, None
    if platform == "cuda" and has_rows:
        num_tokens = math.prod(types.ckv.shape[:-1])
        scratch_bytes, plan_bytes = _backends.ragged_bytes(
            call, num_tokens, params.backend, rotates_query=types.rope_table is not None
        )
        scratch = (scratch_bytes,)
        plan = _plan(call, num_tokens, params.backend, plan_bytes) if plan_bytes else None
    elif platform == "cuda":
        scratch = _backends.scratch_shape(op, call, params.backend)
    return FfiCall(
        target="jax_mla_ragged" if has_rows else "jax_mla_decode",
        attrs={
            "sm_scale": np.float32(params.sm_scale),
            "causal": np.bool_(params.causal),
            "num_splits": np.int64(params.num_splits),
            "batch_invariant": np.bool_(params.batch_invariant),
            "backend": params.backend,
            "has_layer": np.bool_(params.has_layer),
            "max_seq_len": np.int64(params.max_seq_len),
            "kv_format": params.kv_format,
            "sliding_window": np.int64(params.sliding_window),
            "soft_cap": np.float32(params.soft_cap),
            "norm_eps": np.float32(params.norm_eps),
            "rope_interleaved": np.bool_(params.rope_interleaved),
        },
        aliases=pools_in_place(types, first=2) if has_rows else {},
        scratch_shape=scratch,
        plan=plan,
    )


def _plan(step: _backends.DecodeCall, num_tokens: int, backend: str, num_bytes: int) -> PlanCall:
    """Return the call that makes the plan of a step."""
    return PlanCall(
        target="jax_mla_ragged_plan",
        attrs={
            "dtype": step.dtype,
            "num_tokens": np.int64(num_tokens),
            "q_len": np.int64(step.q_len),
            "num_heads": np.int64(step.num_heads),
            "d_ckv": np.int64(step.d_ckv),
            "d_kpe": np.int64(step.d_kpe),
            "page_size": np.int64(step.page_size),
            "max_pages_per_seq": np.int64(step.max_pages_per_seq),
            "max_seq_len": np.int64(step.max_seq_len),
            "num_splits": np.int64(step.num_splits),
            "batch_invariant": np.bool_(step.batch_invariant),
            "sliding_window": np.int64(step.sliding_window),
            "has_soft_cap": np.bool_(step.has_soft_cap),
            "backend": backend,
            "kv_format": step.kv_format,
        },
        operands=("seq_lens",) if step.q_len else ("seq_lens", "cu_q_lens", "num_seqs"),
        num_bytes=num_bytes,
    )


# ---- Batching ----------------------------------------------------------------------------------


def batch(
    operands: Operands, dims: Operands, size: int, params: Params
) -> tuple[Operands, list[int | None], Params]:
    """Add one mapped axis; the top of this file says where.

    Raises:
      ValueError: there are new rows, and not only the query is mapped.
    """
    others = dims._replace(q_nope=None, q_pe=None)
    if not jax.tree.leaves(others):  # only the query is mapped
        axis = operands.q_nope.ndim - (dims.q_nope is not None) - 1  # before d_ckv
        q_nope = _primitive.insert_axis(operands.q_nope, dims.q_nope, size, axis)
        q_pe = operands.q_pe
        if q_pe is not None:
            q_pe = _primitive.insert_axis(q_pe, dims.q_pe, size, axis)
        pool_dims = [None] * (0 if operands.ckv is None else len(operands.kv_pages))
        return operands._replace(q_nope=q_nope, q_pe=q_pe), [axis, axis, *pool_dims], params
    if operands.ckv is not None:
        names = [
            name for name, dim in zip(others._fields, others, strict=True) if jax.tree.leaves(dim)
        ]
        raise ValueError(
            f"{RAGGED_NAME}: vmap: expected only q_nope and q_pe mapped, got {', '.join(names)} "
            "mapped; pass the tokens of all sequences end to end, or call append and decode, which "
            "take mapped caches"
        )
    scalars = ("layer", "page_begin", "kv_scale", "q_scale")
    mapped = _primitive.insert_axes(operands, dims, size, shared=scalars, pools="kv_pages")
    pool_dims = tuple(i + 1 for i in params.pool_dims)
    if jax.tree.leaves(dims.kv_pages):
        pool_dims = (0, *pool_dims)
    return mapped, [0, 0], dataclasses.replace(params, pool_dims=pool_dims)


OP = Op(
    name=NAME,
    results=results,
    local=functools.partial(local, NAME),
    reference=run_reference,
    ffi=functools.partial(ffi, NAME),
    batch=batch,
    factors=factors,
    merges=True,
    take_rows=exchange,
    keep_owned=keep_owned_pages,
)
bind, _ = _primitive.define(OP)
bind_ragged, _ = _primitive.define(
    dataclasses.replace(
        OP,
        name=RAGGED_NAME,
        local=functools.partial(local, RAGGED_NAME),
        ffi=functools.partial(ffi, RAGGED_NAME),
        query=("q_nope", "q_pe", "q_scale"),
    )
)

"""The primitive behind `ragged_paged_attention`: operands, batching, sharding factors, lowering.

A *uniform* call has the same number of tokens for each sequence. The outer primitive takes its
tokens as [seqs, q_len, ...], because sequences and their tokens are split over devices together. In
a *ragged* call `cu_q_lens` says which tokens belong to which sequence. The handler takes the tokens
of both end to end. The call is append and decode in one, so this file uses both of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import _backends, _primitive, _sharding
from jax_mla._op import Factors, FfiCall, Op, PlanCall
from jax_mla.kv_cache import (
    bound_of_lengths,
    format_name,
    has_packs,
    packed_width,
    pool_sizes,
    row_alignment,
)
from jax_mla.ops import _ragged
from jax_mla.ops.append import primitive as append
from jax_mla.ops.append import transforms
from jax_mla.ops.decode import primitive as decode
from jax_mla.ops.decode import ragged_reference
from jax_mla.ops.decode import reference as decode_reference

NAME = "jax_mla.ragged_paged_attention"


class Operands(NamedTuple):
    """The operands of a call, or one item for each of them.

    *tokens is seqs, q_len in the outer primitive of a uniform call, and tokens everywhere else.

    Attributes:
      q_nope: [*tokens, *heads, d_ckv].
      q_pe: [*tokens, *heads, d_kpe].
      ckv: [*tokens, d_ckv].
      kpe: [*tokens, d_kpe].
      page_table: [seqs, max_pages_per_seq] int32.
      seq_lens: [seqs] int32.
      cu_q_lens: [seqs + 1] int32, or [seqs + groups] for groups with local pages; None in a uniform
        call.
      num_seqs: [1] or [groups] int32; None in a uniform call.
      layer: [1] int32.
      page_begin: [1] int32.
      kv_scale: [1, 2] float32, of ckv and kpe; None if the format has none.
      q_scale: [1, 1] float32; None if the queries have none.
      norm_weight: [d_ckv] float32; None if ckv is written as it is.
      rope_table: [num_positions, d_kpe] float32; None if kpe and q_pe are taken as they are.
      rope_lens: [seqs] int32, the lengths by which tokens are rotated: `seq_lens`, of whole
        sequences where those are shortened. None without rope_table.
      kv_pages: one pool or two, [(num_layers,) num_pages, *rows, width], see
        `kv_cache.pool_sizes`.
    """

    q_nope: Any
    q_pe: Any
    ckv: Any
    kpe: Any
    page_table: Any
    seq_lens: Any
    cu_q_lens: Any
    num_seqs: Any
    layer: Any
    page_begin: Any
    kv_scale: Any
    q_scale: Any
    norm_weight: Any
    rope_table: Any
    rope_lens: Any
    kv_pages: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Params:
    """The static parameters of a call.

    Attributes:
      sm_scale: factor on the scores.
      q_len: tokens of each sequence; 0 if `cu_q_lens` says it.
      num_splits: at most this many parts a sequence; 0 chooses.
      batch_invariant: whether a sequence's result must not depend on the others.
      backend: the FFI attribute; "" chooses.
      has_layer: whether the pools are stacked.
      has_local_pages: whether page ids are local, so that the tokens, `cu_q_lens` and `num_seqs`
        of a ragged call have a part for each group.
      max_seq_len: bound of the lengths; 0 for the width of the page table.
      kv_format: how the cache is stored, see `kv_cache.stored_format`.
      norm_eps: see `append.transforms.rms_norm`.
      rope_interleaved: see `append.transforms.rotate`.
    """

    sm_scale: float
    q_len: int
    num_splits: int
    batch_invariant: bool
    backend: str
    has_layer: bool
    has_local_pages: bool = False
    max_seq_len: int = 0
    kv_format: str = ""
    norm_eps: float = 0.0
    rope_interleaved: bool = False


def results(types: Operands, params: Params) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of out, lse and the new pools."""
    del params
    q_nope = types.q_nope
    return [
        jax.ShapeDtypeStruct(q_nope.shape, q_nope.dtype),
        jax.ShapeDtypeStruct(q_nope.shape[:-1], jnp.float32),
        *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in types.kv_pages),
    ]


def _tokens_and_heads(q_nope: Any, params: Params) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the sizes of the dimensions *tokens and *heads of the outer primitive."""
    num_token_dims = 2 if params.q_len else 1
    return q_nope.shape[:num_token_dims], q_nope.shape[num_token_dims:-1]


def factors(types: Operands, params: Params) -> tuple[Operands, Factors]:
    """Name the dimensions that are split alike; see `_sharding.py`.

    The tokens of a ragged call are not split, because no dimension of theirs goes with the
    sequences, unless each group of sequences has its own tokens and its own pages.
    """
    is_whole = not params.q_len and not params.has_local_pages
    seqs = "whole_seqs" if is_whole else _sharding.BATCH
    tokens = ["whole_tokens" if is_whole else _sharding.BATCH]
    tokens = [*tokens, "whole_qlen"] if params.q_len else tokens
    heads = [f"heads{i}" for i in range(len(_tokens_and_heads(types.q_nope, params)[1]))]
    query = [*tokens, *heads]
    pools = _sharding.pool_factors((), types.kv_pages, params.has_layer)
    operands = Operands(
        q_nope=[*query, "whole_dckv"],
        q_pe=[*query, "whole_dkpe"],
        ckv=[*tokens, "whole_dckv"],
        kpe=[*tokens, "whole_dkpe"],
        page_table=[seqs, "whole_maxpages"],
        seq_lens=[seqs],
        cu_q_lens=None if params.q_len else ["whole_bounds" if is_whole else _sharding.BATCH],
        num_seqs=None if params.q_len else ["whole_numseqs" if is_whole else _sharding.BATCH],
        layer=["whole_layer"],
        page_begin=["whole_pagebegin"],
        kv_scale=_sharding.scale_factors(["whole_batch"], types.kv_scale, "kvscale"),
        q_scale=_sharding.scale_factors(["whole_batch"], types.q_scale, "qscale"),
        norm_weight=None if types.norm_weight is None else ["whole_norm"],
        rope_table=None if types.rope_table is None else ["whole_positions", "whole_angles"],
        rope_lens=None if types.rope_lens is None else [seqs],
        kv_pages=pools,
    )
    return operands, [[*query, "whole_dckv"], query, *pools]


def local(
    bind: Callable[[Operands, Params], list[jax.Array]], operands: Operands, params: Params
) -> list[jax.Array]:
    """Fold the token and head dimensions of one device's blocks, and call the handler."""
    q_nope = operands.q_nope
    tokens, heads = _tokens_and_heads(q_nope, params)
    if len(tokens) == len(heads) == 1:
        return bind(operands, params)
    rows = (math.prod(tokens), math.prod(heads))
    folded = operands._replace(
        q_nope=q_nope.reshape(*rows, q_nope.shape[-1]),
        q_pe=operands.q_pe.reshape(*rows, operands.q_pe.shape[-1]),
        ckv=operands.ckv.reshape(rows[0], operands.ckv.shape[-1]),
        kpe=operands.kpe.reshape(rows[0], operands.kpe.shape[-1]),
    )
    out, lse, *pools = bind(folded, params)
    return [out.reshape(q_nope.shape), lse.reshape(q_nope.shape[:-1]), *pools]


def _bound_of_lengths(operands: Operands, params: Params) -> Any:
    page_size = pool_sizes(operands.kv_pages[0], params.has_layer).page_size
    return bound_of_lengths(operands.page_table.shape[1] * page_size, params.max_seq_len)


def keep_owned_pages(operands: Operands, params: Params) -> Operands:
    """Shorten every sequence to the pages that the pool holds, see `decode.shorten`.

    A length for which the call has no room stays as it is, because it writes nothing.
    """
    page_table, seq_lens = operands.page_table, operands.seq_lens
    if operands.cu_q_lens is None:
        q_lens = operands.q_nope.shape[1]
    else:
        groups = operands.num_seqs.shape[0]
        bounds = _ragged.bounds(
            operands.cu_q_lens.reshape(groups, -1),
            operands.num_seqs[:, None],
            operands.q_nope.shape[0] // groups,
        )
        q_lens = (bounds[:, 1:] - bounds[:, :-1]).reshape(seq_lens.shape)
    pool = pool_sizes(operands.kv_pages[0], params.has_layer)
    bound = _bound_of_lengths(operands, params)
    table, lens = decode.shorten(page_table, seq_lens, q_lens, operands.page_begin, pool, bound)
    fits = (seq_lens >= 0) & (seq_lens <= bound)
    return operands._replace(
        page_table=jnp.where(fits[:, None], table, page_table),
        seq_lens=jnp.where(fits, lens, seq_lens),
    )


def _rotation_positions(operands: Operands, params: Params) -> jax.Array:
    """Return for each token the position by which it is rotated, [*tokens] int32, any values."""
    lens = jnp.clip(operands.rope_lens, 0, _bound_of_lengths(operands, params))
    tokens = operands.ckv.shape[:-1]
    if operands.cu_q_lens is None:
        from_end = jnp.arange(-params.q_len, 0, dtype=jnp.int32)
        return (lens[:, None] + from_end[None]).reshape(tokens)
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


def exchange(operands: Operands, params: Params, axes: _sharding.Axes) -> Operands:
    """Write the new rows of all sequences of a uniform call, by an all-gather of the rows.

    Each device attends for its own sequences, but it holds pages of the others' as well. It
    transforms its own rows before, so that a row has the same bits in all copies of a page.
    """
    operands = _transformed(operands, params)
    seq_lens, q_len = operands.seq_lens, operands.q_nope.shape[1]
    bound = _bound_of_lengths(operands, params)
    first = jnp.where((seq_lens >= 0) & (seq_lens <= bound), seq_lens - q_len, -q_len)
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
    pools = append.bind_local(append.exchange(rows, how, axes), how)
    return operands._replace(kv_pages=tuple(pools))


def run_reference(operands: Operands, params: Params) -> list[jax.Array]:
    """Run the reference on the operands of the inner primitive."""
    operands = _transformed(operands, params)
    pools = operands.kv_pages
    out, *lse, new = ragged_reference.ragged_paged_attention(
        operands.q_nope,
        operands.q_pe,
        operands.ckv,
        operands.kpe,
        pools[0] if len(pools) == 1 else (pools[0], pools[1]),
        operands.page_table,
        operands.seq_lens,
        operands.cu_q_lens,
        None if operands.num_seqs is None else operands.num_seqs[0],
        sm_scale=params.sm_scale,
        layer=operands.layer[0] if params.has_layer else None,
        packs=has_packs(pools, params.has_layer),
        return_lse=True,
        max_seq_len=params.max_seq_len or None,
        page_begin=operands.page_begin[0],
        kv_format=format_name(params.kv_format),
        kv_scale=decode_reference.columns(operands.kv_scale),
        q_scale=None if operands.q_scale is None else operands.q_scale[:, 0],
    )
    new_pools = new if isinstance(new, tuple) else (new,)
    return [out.astype(operands.q_nope.dtype), *lse, *new_pools]


def ffi(platform: str, types: Operands, params: Params) -> FfiCall | None:
    """Choose the custom call for a platform; None means the reference."""
    if _backends.uses_reference(NAME, params.backend, platform):
        return None
    num_tokens, num_heads, d_ckv = types.q_nope.shape
    call = _backends.DecodeCall(
        dtype=jnp.dtype(types.q_nope.dtype).name,
        batch=types.page_table.shape[0],
        q_len=params.q_len,
        num_heads=num_heads,
        d_ckv=d_ckv,
        d_kpe=types.q_pe.shape[-1],
        page_size=pool_sizes(types.kv_pages[0], params.has_layer).page_size,
        max_pages_per_seq=types.page_table.shape[-1],
        num_splits=params.num_splits,
        batch_invariant=params.batch_invariant,
        max_seq_len=params.max_seq_len,
        row_alignment=row_alignment(types.kv_pages),
        kv_format=params.kv_format,
        packed_width=packed_width(types.kv_pages),
    )
    _backends.require(platform, call, params.backend, op=NAME)
    first_pool = len(jax.tree.leaves(types._replace(kv_pages=())))
    scratch = plan = None
    if platform == "cuda":
        scratch_bytes, plan_bytes = _backends.ragged_bytes(
            call, num_tokens, params.backend, rotates_query=types.rope_table is not None
        )
        scratch = (scratch_bytes,)
        if plan_bytes:
            plan = _plan(call, num_tokens, params, first_pool, plan_bytes)
            first_pool += 1
    return FfiCall(
        target="jax_mla_ragged",
        attrs={
            "sm_scale": np.float32(params.sm_scale),
            "q_len": np.int64(params.q_len),
            "num_splits": np.int64(params.num_splits),
            "batch_invariant": np.bool_(params.batch_invariant),
            "backend": params.backend,
            "has_layer": np.bool_(params.has_layer),
            "has_plan": np.bool_(plan is not None),
            "max_seq_len": np.int64(params.max_seq_len),
            "kv_format": params.kv_format,
            "has_q_scale": np.bool_(types.q_scale is not None),
            "has_norm": np.bool_(types.norm_weight is not None),
            "norm_eps": np.float32(params.norm_eps),
            "has_rope": np.bool_(types.rope_table is not None),
            "rope_interleaved": np.bool_(params.rope_interleaved),
        },
        aliases={first_pool + i: 2 + i for i in range(len(types.kv_pages))},
        scratch_shape=scratch,
        plan=plan,
    )


def _plan(
    step: _backends.DecodeCall, num_tokens: int, params: Params, index: int, num_bytes: int
) -> PlanCall:
    """Return the call that makes the plan of a step, which is its operand `index`."""
    fields = Operands._fields
    names = ("seq_lens",) if params.q_len else ("seq_lens", "cu_q_lens", "num_seqs")
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
            "backend": params.backend,
            "kv_format": step.kv_format,
        },
        operands=tuple(fields.index(name) for name in names),
        index=index,
        num_bytes=num_bytes,
    )


def batch(
    operands: Operands, dims: Operands, size: int, params: Params
) -> tuple[Operands, list[int | None], Params]:
    """Add one mapped axis of the query, as more heads: the rows are written and read once.

    Raises:
      ValueError: another operand is mapped. Every mapped call would then write a cache of its own.
    """
    others = dims._replace(q_nope=None, q_pe=None)
    if jax.tree.leaves(others):
        names = [
            name for name, dim in zip(others._fields, others, strict=True) if jax.tree.leaves(dim)
        ]
        raise ValueError(
            f"{NAME}: vmap: expected only q_nope and q_pe mapped, got {', '.join(names)} mapped; "
            "pass the tokens of all sequences end to end, or call append and decode, which take "
            "mapped caches"
        )
    axis = operands.q_nope.ndim - (dims.q_nope is not None) - 1  # before d_ckv
    q_nope = _primitive.insert_axis(operands.q_nope, dims.q_nope, size, axis)
    q_pe = _primitive.insert_axis(operands.q_pe, dims.q_pe, size, axis)
    mapped = operands._replace(q_nope=q_nope, q_pe=q_pe)
    return mapped, [axis, axis, *(None for _ in operands.kv_pages)], params


bind, _ = _primitive.define(
    Op(
        name=NAME,
        results=results,
        local=local,
        reference=run_reference,
        ffi=ffi,
        batch=batch,
        factors=factors,
        merges=True,
        query=("q_nope", "q_pe", "q_scale"),
        exchange=exchange,
        keep_owned=keep_owned_pages,
    )
)

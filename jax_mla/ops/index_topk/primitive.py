"""The primitive behind `index_topk`: operands, batching, sharding factors, lowering.

A *uniform* call has the same number of tokens for each sequence. The outer primitive takes its
tokens as [seqs, q_len, ...], because sequences and their tokens are split over devices together. In
a *ragged* call `cu_q_lens` says which tokens belong to which sequence; there the tokens are split,
and every device gets all sequences. The handler takes the tokens of both end to end.

A plain call has no groups. Every `vmap` adds one to all operands but the pool, and to the pool if
it is mapped. Operands that most calls of a step share, such as `layer`, have size 1 in groups that
do not map them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mla import _compat, _primitive
from jax_mla._mesh import _sharding
from jax_mla._op import Factors, FfiCall, Op, Parts
from jax_mla._runtime import _backends
from jax_mla.kv_cache import bound_of_lengths, fold_groups, pool_sizes
from jax_mla.ops import _index, _ragged
from jax_mla.ops.index_topk import reference

NAME = "jax_mla.index_topk"


class Operands(NamedTuple):
    """The operands of a call, or one item for each of them.

    *tokens is seqs, q_len in the outer primitive of a uniform call, and tokens everywhere else.

    Attributes:
      q: [*groups, *tokens, index_heads, d].
      weights: [*groups, *tokens, index_heads] float32.
      page_table: [*groups, seqs, max_pages_per_seq] int32.
      seq_lens: [*groups, seqs] int32.
      cu_q_lens: [*groups, seqs + 1] int32, or for parts with local pages [seqs + parts]; None in a
        uniform call.
      num_seqs: [*groups, 1] int32, or [parts]; None in a uniform call.
      layer: [*groups, 1] int32; each of groups may also be 1.
      page_begin: like `layer`.
      index_pages: one pool, [*pool groups, (num_layers,) num_pages, page_size, width].
    """

    q: Any
    weights: Any
    page_table: Any
    seq_lens: Any
    cu_q_lens: Any
    num_seqs: Any
    layer: Any
    page_begin: Any
    index_pages: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Params:
    """The static parameters of a call.

    Attributes:
      k: how many keys are chosen.
      q_len: tokens of each sequence; 0 if `cu_q_lens` says it.
      backend: the FFI attribute; "" chooses.
      has_layer: whether the pool is stacked.
      has_local_pages: whether page ids are local, so that the tokens, `cu_q_lens` and `num_seqs`
        of a ragged call have a part for each group of sequences.
      return_positions: whether the lists hold positions and not slots.
      return_scores: whether there is a third result, the scores of what was chosen.
      max_seq_len: bound of the lengths; 0 for the width of the page table.
      pool_dims: which groups the pool has.
    """

    k: int
    q_len: int
    backend: str
    has_layer: bool
    has_local_pages: bool = False
    return_positions: bool = False
    return_scores: bool = False
    max_seq_len: int = 0
    pool_dims: tuple[int, ...] = ()


def _groups(x: Operands) -> tuple[Any, ...]:
    return x.page_table.shape[:-2]


def results(types: Operands, params: Params) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the lists, of their lengths, and of the scores if wanted."""
    tokens = types.weights.shape[:-1]
    lists = [jax.ShapeDtypeStruct((*tokens, params.k), jnp.int32)]
    lists += [jax.ShapeDtypeStruct(tokens, jnp.int32)]
    scores = jax.ShapeDtypeStruct((*tokens, params.k), jnp.float32)
    return [*lists, scores] if params.return_scores else lists


def factors(types: Operands, params: Params) -> tuple[Operands, Factors]:
    """Name the dimensions that are split alike; see `_sharding.py`."""
    groups = [f"groups{i}" for i in range(len(_groups(types)))]
    is_ragged = types.cu_q_lens is not None
    is_whole = is_ragged and not params.has_local_pages
    seqs = [*groups, "whole_seqs" if is_whole else _sharding.BATCH if is_ragged else "batch0"]
    tokens = [*groups, _sharding.BATCH] if is_ragged else [*seqs, "whole_qlen"]
    bounds, number = (
        [*groups, f"whole_{name}" if is_whole else _sharding.BATCH] if is_ragged else None
        for name in ("bounds", "numseqs")
    )
    scalar = [*groups, "whole_batch"]
    operands = Operands(
        q=[*tokens, "whole_heads", "whole_d"],
        weights=[*tokens, "whole_heads"],
        page_table=[*seqs, "whole_maxpages"],
        seq_lens=seqs,
        cu_q_lens=bounds,
        num_seqs=number,
        layer=_sharding.scalar_factors(scalar, types.layer.shape, "layer"),
        page_begin=_sharding.scalar_factors(scalar, types.page_begin.shape, "pagebegin"),
        index_pages=_sharding.pool_factors(
            [groups[i] for i in params.pool_dims], types.index_pages, params.has_layer
        ),
    )
    lists = [[*tokens, "whole_k"], tokens]
    return operands, [*lists, [*tokens, "whole_k"]] if params.return_scores else lists


def local(
    bind: Callable[[Operands, Params], list[jax.Array]], operands: Operands, params: Params
) -> list[jax.Array]:
    """Fold the groups and the tokens of one device's blocks, and call the handler."""
    tokens = operands.weights.shape[:-1]
    if not _groups(operands) and len(tokens) == 1:
        return bind(operands, params)
    pool_groups = operands.index_pages[0].shape[: len(params.pool_dims)]
    scalars = operands.layer.shape, operands.page_begin.shape
    is_joined = any(size != 1 for shape in (pool_groups, *scalars) for size in shape)
    needs_slots = is_joined and not params.return_positions  # ids name pages of the joined pools
    inner = dataclasses.replace(
        params, pool_dims=(), return_positions=params.return_positions or is_joined
    )
    chosen, *others = bind(_folded(operands, params), inner)
    if needs_slots:
        chosen = _slots(chosen, operands, params)
    return [x.reshape(*tokens, *x.shape[1:]) for x in (chosen, *others)]


def _folded(operands: Operands, params: Params) -> Operands:
    """Return operands without groups, whose tokens lie end to end: groups become more sequences."""
    q, weights = operands.q, operands.weights
    if operands.cu_q_lens is not None:
        operands = _with_gaps(operands)
    pools, table, layer, begin = fold_groups(
        NAME,
        "index_pages",
        operands.index_pages,
        operands.page_table,
        operands.layer,
        operands.page_begin,
        params.pool_dims,
        params.has_layer,
    )
    num_tokens = math.prod(weights.shape[:-1])
    is_ragged = operands.cu_q_lens is not None
    return operands._replace(
        q=q.reshape(num_tokens, *q.shape[-2:]),
        weights=weights.reshape(num_tokens, weights.shape[-1]),
        page_table=table,
        seq_lens=operands.seq_lens.reshape(-1),
        num_seqs=jnp.full((1,), table.shape[0], jnp.int32) if is_ragged else None,
        layer=layer,
        page_begin=begin,
        index_pages=tuple(pools),
    )


def _with_gaps(operands: Operands) -> Operands:
    """Join the sequences of the groups of a ragged call.

    Behind the sequences of each group comes one more, of length 0, that takes the group's padding.
    So the next group's sequences begin where its tokens do.
    """
    groups, num_tokens = _groups(operands), operands.weights.shape[-2]
    num_groups = math.prod(groups)
    bounds = _ragged.bounds(operands.cu_q_lens, operands.num_seqs, num_tokens)
    group = jnp.arange(num_groups, dtype=jnp.int32).reshape(*groups, 1)
    bounds = (bounds + group * num_tokens).reshape(-1)
    end = jnp.full((1,), num_groups * num_tokens, jnp.int32)
    keep = [(0, 0)] * len(groups)
    return operands._replace(
        page_table=jnp.pad(operands.page_table, [*keep, (0, 1), (0, 0)], constant_values=-1),
        seq_lens=jnp.pad(operands.seq_lens, [*keep, (0, 1)]),
        cu_q_lens=jnp.concatenate([bounds, end]),
    )


def _slots(chosen: jax.Array, operands: Operands, params: Params) -> jax.Array:
    """Return the slots of positions [all tokens, k], group by group."""
    tokens, table = operands.weights.shape[:-1], operands.page_table
    groups, seqs = _groups(operands), table.shape[-2]
    page_size = pool_sizes(
        operands.index_pages[0], params.has_layer, len(params.pool_dims)
    ).page_size
    if operands.cu_q_lens is None:
        # Each sequence reads its own row of the table, so Explicit axes may split the sequences.
        positions = chosen.reshape(*tokens, chosen.shape[-1])
        column = jnp.maximum(positions, 0) // page_size
        page = jnp.take_along_axis(table, column.reshape(*tokens[:-1], -1), axis=-1)
        slots = _index.slots_of(page.reshape(positions.shape), positions, page_size)
        return slots.reshape(chosen.shape)

    def of_group(cu_q_lens: jax.Array, num_seqs: jax.Array) -> jax.Array:
        bounds = _ragged.bounds(cu_q_lens, num_seqs, tokens[-1])
        return jnp.maximum(_ragged.sequence_of_tokens(bounds, tokens[-1]), 0)

    for _ in groups:
        of_group = jax.vmap(of_group)
    sequence = of_group(operands.cu_q_lens, operands.num_seqs)
    if groups:
        group = jnp.arange(math.prod(groups), dtype=jnp.int32).reshape(*groups, 1)
        sequence = sequence + group * seqs
    return _index.slots_at(
        table.reshape(-1, table.shape[-1]), sequence.reshape(-1), chosen, page_size
    )


def split_tokens(operands: Operands, params: Params, axes: _sharding.Axes) -> Operands:
    """Return the operands of a ragged call for this device's part of the tokens.

    The sequences keep the tokens that are here, and their lengths end where those end. Nothing is
    communicated.
    """
    num_tokens = operands.weights.shape[-2]
    begin = (lax.axis_index(axes) * num_tokens).astype(jnp.int32)
    total = num_tokens * lax.axis_size(axes)
    bounds = _ragged.bounds(operands.cu_q_lens, operands.num_seqs, total)
    page_size = pool_sizes(
        operands.index_pages[0], params.has_layer, len(params.pool_dims)
    ).page_size
    bound = bound_of_lengths(operands.page_table.shape[-1] * page_size, params.max_seq_len)
    beyond = jnp.maximum(bounds[..., 1:] - (begin + num_tokens), 0)
    return operands._replace(
        seq_lens=jnp.clip(operands.seq_lens, 0, bound) - beyond,
        cu_q_lens=jnp.clip(bounds - begin, 0, num_tokens),
    )


def _params_of_part(params: Params) -> Params:
    return dataclasses.replace(params, return_positions=True, return_scores=True)


def _merge_parts(
    found: list[jax.Array], operands: Operands, params: Params, axes: _sharding.Axes
) -> list[jax.Array]:
    """Choose the best of what each device chose from its part of the pages: still exact.

    One all-gather of positions and scores. A key is on one device only, so none comes twice.
    """
    positions, _, scores = found
    tokens, k = positions.shape[:-1], params.k
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    both = jnp.stack([positions, bits]).reshape(2, -1, k)
    # [2, tokens, parts * k], of a type that shows it to be the same on all devices where types do.
    has_type = bool(_compat.varying_axes(jax.typeof(both)))
    to = "invarying" if has_type else "varying"
    both = lax.all_gather(both, axes, axis=2, tiled=True, to=to)
    positions, scores = both[0], lax.bitcast_convert_type(both[1], jnp.float32)
    chosen, lens, scores = reference.choose_each(positions, scores, positions >= 0, k)
    if not params.return_positions:
        chosen = _slots(chosen, operands, params)
    merged = [chosen.reshape(*tokens, k), lens.reshape(tokens)]
    return [*merged, scores.reshape(*tokens, k)] if params.return_scores else merged


def bind_part(
    operands: Operands, params: Params, axes: _sharding.Axes, page_table: jax.Array
) -> list[jax.Array]:
    """Choose from this device's pages, and then the best of what all devices along `axes` chose.

    `page_table` is the same on all of them, which that of the operands need not be.
    """
    found = bind(operands, _params_of_part(params))
    return _merge_parts(found, operands._replace(page_table=page_table), params, axes)


def run_reference(operands: Operands, params: Params) -> list[jax.Array]:
    """Run the reference on the operands of the inner primitive."""
    found = reference.index_topk(
        operands.q,
        operands.weights,
        operands.index_pages[0],
        operands.page_table,
        operands.seq_lens,
        operands.cu_q_lens,
        None if operands.num_seqs is None else operands.num_seqs[0],
        k=params.k,
        layer=operands.layer[0] if params.has_layer else None,
        return_positions=params.return_positions,
        return_scores=params.return_scores,
        max_seq_len=params.max_seq_len or None,
        page_begin=operands.page_begin[0],
    )
    return list(found)


def ffi(platform: str, types: Operands, params: Params) -> FfiCall | None:
    """Choose the custom call for a platform; None means the reference."""
    if _backends.uses_reference(NAME, params.backend, platform):
        return None
    num_tokens, num_heads, d = types.q.shape
    pages = types.index_pages[0]
    page_size = pool_sizes(pages, params.has_layer).page_size
    scratch = None
    if platform == "cuda":
        q_dtype, key_dtype = (jnp.dtype(x.dtype).name for x in (types.q, pages))
        call = _backends.IndexTopkCall(
            q_dtype=q_dtype,
            key_dtype="float8_e4m3fn" if _index.is_fp8(pages) else key_dtype,
            num_tokens=num_tokens,
            num_heads=num_heads,
            d=d,
            k=params.k,
            page_size=page_size,
            max_seq_len=bound_of_lengths(
                types.page_table.shape[-1] * page_size, params.max_seq_len
            ),
            is_ragged=params.q_len == 0,
        )
        scratch = (_backends.index_topk_scratch_bytes(call, params.backend),)
    return FfiCall(
        target="jax_mla_index_topk",
        attrs={
            "k": np.int64(params.k),
            "q_len": np.int64(params.q_len),
            "has_layer": np.bool_(params.has_layer),
            "return_positions": np.bool_(params.return_positions),
            "return_scores": np.bool_(params.return_scores),
            "max_seq_len": np.int64(params.max_seq_len),
            "backend": params.backend,
        },
        aliases={},
        scratch_shape=scratch,
    )


def batch(
    operands: Operands, dims: Operands, size: int, params: Params
) -> tuple[Operands, list[int], Params]:
    """Add one mapped axis, in front of all operands; of the pool only if it is mapped."""
    mapped = _primitive.insert_axes(
        operands, dims, size, shared=("layer", "page_begin"), pools="index_pages"
    )
    pool_dims = tuple(i + 1 for i in params.pool_dims)
    if jax.tree.leaves(dims.index_pages):
        pool_dims = (0, *pool_dims)
    num_results = 2 + params.return_scores
    return mapped, [0] * num_results, dataclasses.replace(params, pool_dims=pool_dims)


bind, _ = _primitive.define(
    Op(
        name=NAME,
        results=results,
        local=local,
        reference=run_reference,
        ffi=ffi,
        batch=batch,
        factors=factors,
        merges=False,
        take_rows=split_tokens,
        parts=Parts(params=_params_of_part, merge=_merge_parts),
    )
)

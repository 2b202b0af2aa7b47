"""The primitive behind `decode`: operands, batching, sharding factors, lowering.

A plain call has one batch dimension, one heads dimension and no groups. Every `vmap` adds one more:

* of heads, if only the query is mapped: the cache is then read once;
* of batch otherwise, and of groups as well if the pools are mapped.

Dimensions are folded only after the sharding is known, so a mapped axis that is sharded costs
nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mla import _backends, _primitive, _sharding
from jax_mla._op import Factors, FfiCall, Op
from jax_mla.kv_cache import (
    PoolSizes,
    bound_of_lengths,
    fold_groups,
    format_name,
    has_packs,
    local_pages,
    packed_width,
    pool_sizes,
    row_alignment,
)
from jax_mla.ops.decode import reference

NAME = "jax_mla.decode"


class Operands(NamedTuple):
    """The operands of a call, or one item for each of them.

    Attributes:
      q_nope: [*batch, q_len, *heads, d_ckv].
      q_pe: [*batch, q_len, *heads, d_kpe].
      page_table: [*batch, max_pages_per_seq] int32.
      seq_lens: [*batch] int32.
      layer: int32, as many dimensions as batch; each has size 1 or the batch's.
      page_begin: like `layer`.
      kv_scale: float32, `layer`'s dimensions and 2: of ckv and kpe; None if the format has none.
      q_scale: float32, `layer`'s dimensions and 1; None if the queries have none.
      kv_pages: one pool or two, [*groups, (num_layers,) num_pages, *rows, width], see
        `kv_cache.pool_sizes`.
    """

    q_nope: Any
    q_pe: Any
    page_table: Any
    seq_lens: Any
    layer: Any
    page_begin: Any
    kv_scale: Any
    q_scale: Any
    kv_pages: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Params:
    """The static parameters of a call.

    Attributes:
      sm_scale: factor on the scores.
      causal: whether the mask is causal.
      num_splits: at most this many parts a sequence; 0 chooses.
      batch_invariant: whether a sequence's result must not depend on the others.
      backend: the FFI attribute; "" chooses.
      has_layer: whether the pools are stacked.
      max_seq_len: bound of the lengths; 0 for the width of the page table.
      pool_dims: which batch dimensions the pools have too, as groups.
      kv_format: how the cache is stored, see `kv_cache.stored_format`.
    """

    sm_scale: float
    causal: bool
    num_splits: int
    batch_invariant: bool
    backend: str
    has_layer: bool
    max_seq_len: int = 0
    pool_dims: tuple[int, ...] = ()
    kv_format: str = ""


AnyParams = TypeVar("AnyParams", bound=Params)  # those of an op that is built from this one


def results(types: Operands, params: Params) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of out and lse."""
    del params
    q_nope = types.q_nope
    return [
        jax.ShapeDtypeStruct(q_nope.shape, q_nope.dtype),
        jax.ShapeDtypeStruct(q_nope.shape[:-1], jnp.float32),
    ]


def factors(types: Operands, params: Params) -> tuple[Operands, Factors]:
    """Name the dimensions that are split alike; see `_sharding.py`."""
    batch = [f"batch{i}" for i in range(types.seq_lens.ndim)]
    heads = [f"heads{i}" for i in range(types.q_nope.ndim - len(batch) - 2)]
    query = [*batch, "whole_qlen", *heads]
    groups = [batch[i] for i in params.pool_dims]
    operands = Operands(
        q_nope=[*query, "whole_dckv"],
        q_pe=[*query, "whole_dkpe"],
        page_table=[*batch, "whole_maxpages"],
        seq_lens=batch,
        layer=_sharding.scalar_factors(batch, types.layer.shape, "layer"),
        page_begin=_sharding.scalar_factors(batch, types.page_begin.shape, "pagebegin"),
        kv_scale=_sharding.scale_factors(batch, types.kv_scale, "kvscale"),
        q_scale=_sharding.scale_factors(batch, types.q_scale, "qscale"),
        kv_pages=_sharding.pool_factors(groups, types.kv_pages, params.has_layer),
    )
    return operands, [[*query, "whole_dckv"], query]


def local(
    bind: Callable[[Operands, Params], list[jax.Array]], operands: Operands, params: Params
) -> list[jax.Array]:
    """Fold the batch, head and group dimensions of one device's blocks, and call the handler."""
    q_nope, q_pe, seq_lens = operands.q_nope, operands.q_pe, operands.seq_lens
    batch, heads = seq_lens.shape, q_nope.shape[seq_lens.ndim + 1 : -1]
    q_len = q_nope.shape[seq_lens.ndim]
    pools, page_table, layer, page_begin = fold_groups(
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
        return bind(folded, params)
    rows = (math.prod(batch), q_len, math.prod(heads))
    folded = folded._replace(
        q_nope=q_nope.reshape(*rows, q_nope.shape[-1]),
        q_pe=q_pe.reshape(*rows, q_pe.shape[-1]),
        seq_lens=seq_lens.reshape(-1),
    )
    out, lse = bind(folded, params)
    return [out.reshape(q_nope.shape), lse.reshape(q_nope.shape[:-1])]


def _fold_scale(scale: jax.Array | None, batch: tuple[Any, ...]) -> jax.Array | None:
    """Return one scale, or one for each sequence: [1 or num_sequences, n]."""
    if scale is None:
        return None
    width = scale.shape[-1]
    if all(size == 1 for size in scale.shape[:-1]):
        return scale.reshape(1, width)
    return jnp.broadcast_to(scale, (*batch, width)).reshape(-1, width)


def keep_owned_pages(operands: Operands, params: Params) -> Operands:
    """Shorten every sequence to the pages that the pool holds, see `shorten`."""
    q_len = operands.q_nope.shape[operands.seq_lens.ndim]
    pool = pool_sizes(operands.kv_pages[0], params.has_layer, len(params.pool_dims))
    bound = bound_of_lengths(operands.page_table.shape[-1] * pool.page_size, params.max_seq_len)
    page_table, seq_lens = shorten(
        operands.page_table, operands.seq_lens, q_len, operands.page_begin, pool, bound
    )
    return operands._replace(page_table=page_table, seq_lens=seq_lens)


def shorten(
    page_table: jax.Array,
    seq_lens: jax.Array,
    q_lens: jax.Array | int,
    page_begin: jax.Array,
    pool: PoolSizes,
    bound: Any,
) -> tuple[jax.Array, jax.Array]:
    """Shorten every sequence to the pages that the pool holds, so that no other page costs time.

    An absent page holds no keys, but a kernel still has to walk past it: a device with a quarter of
    the pages would take as long as one with all of them. The kept keys may move together, because
    only their order relative to the queries matters. The pages of the newest tokens stay in any
    case, and with them the causal mask and the places of these tokens in their pages.

    Nothing here depends on the layer, so XLA computes it once for a step.

    Args:
      page_table: [*batch, max_pages_per_seq] int32.
      seq_lens: [*batch] int32, any values.
      q_lens: query tokens of the sequences, an int or [*batch] int32.
      page_begin: int32, as many dimensions as batch; each has size 1 or the batch's.
      pool: sizes of the pool.
      bound: what the lengths are clamped to, see `bound_of_lengths`.

    Returns:
      The page table and the lengths, clamped, of the shortened sequences.
    """
    _, num_pages, page_size = pool
    max_pages = page_table.shape[-1]
    lens = jnp.clip(seq_lens, 0, bound)
    batch = range(seq_lens.ndim)
    place = jnp.arange(max_pages, dtype=jnp.int32).reshape(*(1 for _ in batch), max_pages)
    _, owned = local_pages(page_table, page_begin[..., None], num_pages)
    last = jnp.maximum(lens - q_lens, 0) // page_size  # first page that stays in any case
    used = place < -(-lens // page_size)[..., None]
    keep = used & (owned | (place >= last[..., None]))
    target = jnp.where(keep, jnp.cumsum(keep, axis=-1, dtype=jnp.int32) - 1, max_pages + place)
    # Not a vmap of a one-dimensional scatter: JAX gives that a wrong type if another vmap with
    # spmd_axis_name is around it.
    along_last = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(seq_lens.ndim,),
        scatter_dims_to_operand_dims=(seq_lens.ndim,),
        operand_batching_dims=tuple(batch),
        scatter_indices_batching_dims=tuple(batch),
    )
    kept = lax.scatter(
        jnp.full_like(page_table, -1),
        target[..., None],
        page_table,
        along_last,
        unique_indices=True,
        mode="drop",
    )
    dropped = jnp.sum(used & ~keep, axis=-1, dtype=jnp.int32)  # only whole pages are dropped
    return kept, lens - dropped * page_size


def run_reference(operands: Operands, params: Params) -> list[jax.Array]:
    """Run the reference on the operands of the inner primitive."""
    pools = operands.kv_pages
    out, lse = reference.decode(
        operands.q_nope,
        operands.q_pe,
        pools[0] if len(pools) == 1 else (pools[0], pools[1]),
        operands.page_table,
        operands.seq_lens,
        sm_scale=params.sm_scale,
        layer=operands.layer[0] if params.has_layer else None,
        packs=has_packs(pools, params.has_layer),
        causal=params.causal,
        return_lse=True,
        max_seq_len=params.max_seq_len or None,
        page_begin=operands.page_begin[0],
        kv_format=format_name(params.kv_format),
        kv_scale=reference.columns(operands.kv_scale),
        q_scale=None if operands.q_scale is None else operands.q_scale[:, 0],
    )
    return [out.astype(operands.q_nope.dtype), lse]


def ffi(platform: str, types: Operands, params: Params, op: str = NAME) -> FfiCall | None:
    """Choose the custom call for a platform; None means the reference.

    Args:
      platform: JAX platform.
      types: types of the operands.
      params: static parameters.
      op: name of the op that is built from this one, for messages.
    """
    if _backends.uses_reference(NAME, params.backend, platform):
        return None
    batch, q_len, num_heads, d_ckv = types.q_nope.shape
    call = _backends.DecodeCall(
        dtype=jnp.dtype(types.q_nope.dtype).name,
        batch=batch,
        q_len=q_len,
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
    _backends.require(platform, call, params.backend, op=op)
    return FfiCall(
        target="jax_mla_decode",
        attrs={
            "sm_scale": np.float32(params.sm_scale),
            "causal": np.bool_(params.causal),
            "num_splits": np.int64(params.num_splits),
            "batch_invariant": np.bool_(params.batch_invariant),
            "backend": params.backend,
            "has_layer": np.bool_(params.has_layer),
            "max_seq_len": np.int64(params.max_seq_len),
            "kv_format": params.kv_format,
            "has_q_scale": np.bool_(types.q_scale is not None),
        },
        aliases={},
        scratch_shape=_backends.scratch_shape(call, params.backend) if platform == "cuda" else None,
    )


def batch(
    operands: Operands, dims: Operands, size: int, params: AnyParams
) -> tuple[Operands, list[int], AnyParams]:
    """Add one mapped axis; the top of this file says where."""
    query = operands.q_nope, operands.q_pe
    query_dims = dims.q_nope, dims.q_pe
    if not jax.tree.leaves(dims._replace(q_nope=None, q_pe=None)):  # only the query is mapped
        axis = operands.q_nope.ndim - (dims.q_nope is not None) - 1  # before d_ckv
        q_nope, q_pe = (
            _primitive.insert_axis(x, d, size, axis) for x, d in zip(query, query_dims, strict=True)
        )
        return operands._replace(q_nope=q_nope, q_pe=q_pe), [axis, axis], params

    def in_front(x: jax.Array, dim: int | None) -> jax.Array:
        return _primitive.insert_axis(x, dim, size, 0)

    def scalar_in_front(x: jax.Array, dim: int | None) -> jax.Array:
        return _primitive.insert_axis(x, dim, 1 if dim is None else size, 0)

    def optional_in_front(x: jax.Array | None, dim: int | None) -> jax.Array | None:
        return None if x is None else scalar_in_front(x, dim)

    pools, pool_dims = operands.kv_pages, tuple(i + 1 for i in params.pool_dims)
    if any(d is not None for d in dims.kv_pages):
        pools = tuple(in_front(x, d) for x, d in zip(pools, dims.kv_pages, strict=True))
        pool_dims = (0, *pool_dims)
    mapped = Operands(
        q_nope=in_front(operands.q_nope, dims.q_nope),
        q_pe=in_front(operands.q_pe, dims.q_pe),
        page_table=in_front(operands.page_table, dims.page_table),
        seq_lens=in_front(operands.seq_lens, dims.seq_lens),
        layer=scalar_in_front(operands.layer, dims.layer),
        page_begin=scalar_in_front(operands.page_begin, dims.page_begin),
        kv_scale=optional_in_front(operands.kv_scale, dims.kv_scale),
        q_scale=optional_in_front(operands.q_scale, dims.q_scale),
        kv_pages=pools,
    )
    return mapped, [0, 0], dataclasses.replace(params, pool_dims=pool_dims)


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
        keep_owned=keep_owned_pages,
    )
)

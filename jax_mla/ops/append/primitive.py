"""The primitive behind `append`: operands, batching, sharding factors, lowering.

A plain call has no groups. Every `vmap` adds one group to all operands, the pools included, because
each mapped call returns a cache of its own. Operands that most calls of a step share, such as
`layer`, have size 1 in groups that do not map them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_mla import _primitive
from jax_mla._mesh import _sharding
from jax_mla._op import Factors, FfiCall, Op, pools_in_place
from jax_mla._runtime import _backends
from jax_mla.kv_cache import format_name, has_packs, pool_sizes
from jax_mla.ops import _new_rows
from jax_mla.ops.append import reference, transforms

NAME = "jax_mla.append"


class Operands(NamedTuple):
    """The operands of a call, or one item for each of them.

    Attributes:
      ckv: [*groups, *tokens, d_ckv]; *tokens is batch, q_len or, in a ragged call, tokens.
      kpe: [*groups, *tokens, d_kpe]; None if the rows have no rotary part.
      page_table: [*groups, batch, max_pages_per_seq] int32.
      positions: [*groups, *tokens] int32.
      cu_q_lens: [*groups, batch + 1] int32 in a ragged call, otherwise None.
      layer: [*groups, 1] int32; each of groups may also be 1.
      page_begin: like `layer`.
      kv_scale: [*groups, 1, 2] float32, of ckv and kpe; None if the format has none.
      norm_weight: [*groups, d_ckv] float32; None if ckv is written as it is.
      rope_table: [*groups, num_positions, d_kpe] float32; None if kpe is written as it is.
      q_pe: [*groups, *tokens, heads, d_kpe], to be rotated too, or None.
      kv_pages: one pool or two, [*groups, (num_layers,) num_pages, *rows, width], see
        `kv_cache.pool_sizes`.
    """

    ckv: Any
    kpe: Any
    page_table: Any
    positions: Any
    cu_q_lens: Any
    layer: Any
    page_begin: Any
    kv_scale: Any
    norm_weight: Any
    rope_table: Any
    q_pe: Any
    kv_pages: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Params:
    """The static parameters of a call.

    Attributes:
      backend: the FFI attribute; "" chooses.
      has_layer: whether the pools are stacked.
      has_local_pages: whether page ids are local, so that the tokens and `cu_q_lens` of a ragged
        call have a part for each group.
      kv_format: how the cache is stored, see `kv_cache.stored_format`.
      norm_eps: see `transforms.rms_norm`.
      rope_interleaved: see `transforms.rotate`.
    """

    backend: str
    has_layer: bool
    has_local_pages: bool = False
    kv_format: str = ""
    norm_eps: float = 0.0
    rope_interleaved: bool = False


SHARED = ("layer", "page_begin", "kv_scale", "norm_weight", "rope_table")


def results(types: Operands, params: Params) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the rotated q_pe, if there is one, and the new pools."""
    del params
    given = [*([] if types.q_pe is None else [types.q_pe]), *types.kv_pages]
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]


def factors(types: Operands, params: Params) -> tuple[Operands, Factors]:
    """Name the dimensions that are split alike; see `_sharding.py`."""
    groups = [f"groups{i}" for i in range(types.layer.ndim - 1)]
    seqs, tokens, bounds = _new_rows.token_factors(
        groups, is_ragged=types.cu_q_lens is not None, has_local_pages=params.has_local_pages
    )
    scalar = [*groups, "whole_batch"]
    pools = _sharding.pool_factors(groups, types.kv_pages, params.has_layer)
    operands = Operands(
        ckv=[*tokens, "whole_dckv"],
        kpe=None if types.kpe is None else [*tokens, "whole_dkpe"],
        page_table=[*seqs, "whole_maxpages"],
        positions=tokens,
        cu_q_lens=bounds,
        layer=_sharding.scalar_factors(scalar, types.layer.shape, "layer"),
        page_begin=_sharding.scalar_factors(scalar, types.page_begin.shape, "pagebegin"),
        kv_scale=_sharding.scale_factors(scalar, types.kv_scale, "kvscale"),
        norm_weight=_sharding.scale_factors(groups, types.norm_weight, "norm"),
        rope_table=_sharding.rope_factors(groups, types.rope_table),
        q_pe=None if types.q_pe is None else [*tokens, "heads0", "whole_dkpe"],
        kv_pages=pools,
    )
    query = [] if operands.q_pe is None else [operands.q_pe]
    return operands, [*query, *pools]


def local(
    bind: Callable[[Operands, Params], list[jax.Array]], operands: Operands, params: Params
) -> list[jax.Array]:
    """Call the inner primitive on one device's blocks; it takes groups as they are."""
    if operands.q_pe is None or operands.rope_table is not None:
        return bind(operands, params)
    return [operands.q_pe, *bind(operands._replace(q_pe=None), params)]  # `exchange` rotated it


def transformed(operands: Operands, params: Params) -> Operands:
    """Normalise ckv and rotate kpe and q_pe, so that the rest of the call only writes."""
    ckv, kpe, q_pe = operands.ckv, operands.kpe, operands.q_pe
    groups, positions = operands.page_table.shape[:-2], operands.positions
    whole = _new_rows.with_all_groups(operands, ("norm_weight", "rope_table"), groups)
    norm, table = whole.norm_weight, whole.rope_table

    def normalise(ckv: jax.Array, weight: jax.Array) -> jax.Array:
        return transforms.rms_norm(ckv, weight, params.norm_eps)

    def rotate(x: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
        return transforms.rotate(x, table, positions, interleaved=params.rope_interleaved)

    for _ in groups:
        normalise, rotate = jax.vmap(normalise), jax.vmap(rotate)
    if norm is not None:
        ckv = normalise(ckv, norm)
    if table is not None:
        kpe = rotate(kpe, table, positions)
        q_pe = None if q_pe is None else rotate(q_pe, table, positions)
    return operands._replace(ckv=ckv, kpe=kpe, q_pe=q_pe, norm_weight=None, rope_table=None)


def exchange(operands: Operands, params: Params, axes: _sharding.Axes) -> Operands:
    """Give every device the new rows of the whole batch.

    Each device transforms its own rows before, because their positions are not exchanged.
    """
    operands = transformed(operands, params)
    num_groups = operands.positions.ndim - 2
    page_size = pool_sizes(operands.kv_pages[0], params.has_layer, num_groups).page_size
    parts = [x for x in (operands.ckv, operands.kpe) if x is not None]
    (ckv, *kpe), page_table, positions = _new_rows.exchange(
        parts, operands.page_table, operands.positions, page_size, axes
    )
    return operands._replace(
        ckv=ckv, kpe=kpe[0] if kpe else None, page_table=page_table, positions=positions
    )


def run_reference(operands: Operands, params: Params) -> list[jax.Array]:
    """Run the reference on the operands of the inner primitive, once for each group."""
    operands = transformed(operands, params)
    groups = operands.page_table.shape[:-2]
    operands = _new_rows.with_all_groups(operands, SHARED, groups)

    def append(one: Operands) -> list[jax.Array]:
        pools = one.kv_pages
        new = reference.append(
            pools[0] if len(pools) == 1 else (pools[0], pools[1]),
            one.ckv,
            one.kpe,
            one.page_table,
            one.positions,
            cu_q_lens=one.cu_q_lens,
            layer=one.layer[0] if params.has_layer else None,
            packs=has_packs(pools, params.has_layer),
            page_begin=one.page_begin[0],
            kv_format=format_name(params.kv_format),
            kv_scale=None if one.kv_scale is None else (one.kv_scale[0, 0], one.kv_scale[0, 1]),
        )
        return list(new) if isinstance(new, tuple) else [new]

    for _ in groups:
        append = jax.vmap(append)
    query = [] if operands.q_pe is None else [operands.q_pe]
    return [*query, *append(operands._replace(q_pe=None))]


def ffi(platform: str, types: Operands, params: Params) -> FfiCall | None:
    """Choose the custom call for a platform; None means the reference.

    With groups it is the reference, which XLA runs as a scatter, in place for any rank. The handler
    would need a pool of another shape, and XLA copies a pool that is reshaped around a call that
    updates it in place.
    """
    if _backends.uses_reference(NAME, params.backend, platform):
        return None
    _backends.require_append(platform)
    if types.layer.ndim > 1:
        return None
    return FfiCall(
        target="jax_mla_append",
        attrs={
            "has_layer": np.bool_(params.has_layer),
            "kv_format": params.kv_format,
            "norm_eps": np.float32(params.norm_eps),
            "rope_interleaved": np.bool_(params.rope_interleaved),
        },
        aliases=pools_in_place(types, first=0 if types.q_pe is None else 1),
    )


def batch(
    operands: Operands, dims: Operands, size: int, params: Params
) -> tuple[Operands, list[int], Params]:
    """Add one mapped axis, in front of all operands."""
    mapped = _primitive.insert_axes(operands, dims, size, shared=SHARED)
    return mapped, [0] * (len(mapped.kv_pages) + (mapped.q_pe is not None)), params


bind, bind_local = _primitive.define(
    Op(
        name=NAME,
        results=results,
        local=local,
        reference=run_reference,
        ffi=ffi,
        batch=batch,
        factors=factors,
        merges=False,
        query=("q_pe",),
        take_rows=exchange,
    )
)

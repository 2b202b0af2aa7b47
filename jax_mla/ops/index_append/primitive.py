"""The primitive behind `index_append`: operands, batching, sharding factors, lowering.

A plain call has no groups. Every `vmap` adds one group to all operands, the pool included, because
each mapped call returns a pool of its own. Operands that most calls of a step share, such as
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
from jax_mla._op import Factors, FfiCall, Op
from jax_mla._runtime import _backends
from jax_mla.kv_cache import pool_sizes
from jax_mla.ops import _new_rows
from jax_mla.ops.index_append import reference, transforms

NAME = "jax_mla.index_append"


class Operands(NamedTuple):
    """The operands of a call, or one item for each of them.

    Attributes:
      k: [*groups, *tokens, d]; *tokens is batch, q_len or, in a ragged call, tokens.
      page_table: [*groups, batch, max_pages_per_seq] int32.
      positions: [*groups, *tokens] int32.
      cu_q_lens: [*groups, batch + 1] int32 in a ragged call, otherwise None.
      layer: [*groups, 1] int32; each of groups may also be 1.
      page_begin: like `layer`.
      norm_weight: [*groups, d] float32; None if keys are not normalised.
      norm_bias: like norm_weight; None for none.
      rope_table: [*groups, num_positions, d_rope] float32; None if keys are not rotated.
      index_pages: one pool, [*groups, (num_layers,) num_pages, page_size, width].
    """

    k: Any
    page_table: Any
    positions: Any
    cu_q_lens: Any
    layer: Any
    page_begin: Any
    norm_weight: Any
    norm_bias: Any
    rope_table: Any
    index_pages: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Params:
    """The static parameters of a call.

    Attributes:
      backend: the FFI attribute; "" chooses.
      has_layer: whether the pool is stacked.
      has_local_pages: whether page ids are local, so that the tokens and `cu_q_lens` of a ragged
        call have a part for each group.
      power_of_two_scales: see `_index.encode_index_keys`.
      norm_eps: see `transforms.layer_norm`.
      rope_interleaved: see `append.transforms.rotate`.
      rope_last: whether the last values of a key are rotated, and not the first.
    """

    backend: str
    has_layer: bool
    has_local_pages: bool = False
    power_of_two_scales: bool = True
    norm_eps: float = 0.0
    rope_interleaved: bool = False
    rope_last: bool = False


SHARED = ("layer", "page_begin", "norm_weight", "norm_bias", "rope_table")


def results(types: Operands, params: Params) -> list[jax.ShapeDtypeStruct]:
    """Return the shape and dtype of the new pool."""
    del params
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types.index_pages]


def factors(types: Operands, params: Params) -> tuple[Operands, Factors]:
    """Name the dimensions that are split alike, as `append` does; see `_sharding.py`."""
    groups = [f"groups{i}" for i in range(types.layer.ndim - 1)]
    seqs, tokens, bounds = _new_rows.token_factors(
        groups, is_ragged=types.cu_q_lens is not None, has_local_pages=params.has_local_pages
    )
    scalar = [*groups, "whole_batch"]
    pools = _sharding.pool_factors(groups, types.index_pages, params.has_layer)
    operands = Operands(
        k=[*tokens, "whole_d"],
        page_table=[*seqs, "whole_maxpages"],
        positions=tokens,
        cu_q_lens=bounds,
        layer=_sharding.scalar_factors(scalar, types.layer.shape, "layer"),
        page_begin=_sharding.scalar_factors(scalar, types.page_begin.shape, "pagebegin"),
        norm_weight=_sharding.scale_factors(groups, types.norm_weight, "norm"),
        norm_bias=_sharding.scale_factors(groups, types.norm_bias, "bias"),
        rope_table=_sharding.rope_factors(groups, types.rope_table),
        index_pages=pools,
    )
    return operands, list(pools)


def local(
    bind: Callable[[Operands, Params], list[jax.Array]], operands: Operands, params: Params
) -> list[jax.Array]:
    """Call the inner primitive on one device's blocks; it takes groups as they are."""
    return bind(operands, params)


def transformed(operands: Operands, params: Params) -> Operands:
    """Normalise and rotate the keys, so that the rest of the call only writes."""

    def transform(k: Any, positions: Any, weight: Any, bias: Any, table: Any) -> jax.Array:
        if weight is not None:
            k = transforms.layer_norm(k, weight, bias, params.norm_eps)
        if table is not None:
            k = transforms.rotate_part(
                k, table, positions, interleaved=params.rope_interleaved, last=params.rope_last
            )
        return k

    operands = _new_rows.with_all_groups(operands, SHARED, _groups(operands))
    for _ in _groups(operands):
        transform = jax.vmap(transform)
    k = transform(
        operands.k, operands.positions, operands.norm_weight, operands.norm_bias,
        operands.rope_table,
    )  # fmt: skip
    return operands._replace(k=k, norm_weight=None, norm_bias=None, rope_table=None)


def _groups(operands: Operands) -> tuple[Any, ...]:
    return operands.page_table.shape[:-2]


def exchange(operands: Operands, params: Params, axes: _sharding.Axes) -> Operands:
    """Give every device the new keys of the whole batch.

    Each device transforms its own keys before, because their positions are not exchanged.
    """
    operands = transformed(operands, params)
    num_groups = len(_groups(operands))
    page_size = pool_sizes(operands.index_pages[0], params.has_layer, num_groups).page_size
    (k,), page_table, positions = _new_rows.exchange(
        [operands.k], operands.page_table, operands.positions, page_size, axes
    )
    return operands._replace(k=k, page_table=page_table, positions=positions)


def run_reference(operands: Operands, params: Params) -> list[jax.Array]:
    """Run the reference on the operands of the inner primitive, once for each group."""
    operands = transformed(operands, params)

    def append(one: Operands) -> jax.Array:
        return reference.index_append(
            one.index_pages[0],
            one.k,
            one.page_table,
            one.positions,
            cu_q_lens=one.cu_q_lens,
            layer=one.layer[0] if params.has_layer else None,
            power_of_two_scales=params.power_of_two_scales,
            page_begin=one.page_begin[0],
        )

    for _ in _groups(operands):
        append = jax.vmap(append)
    return [append(operands)]


def ffi(platform: str, types: Operands, params: Params) -> FfiCall | None:
    """Choose the custom call for a platform; None means the reference.

    With groups it is the reference, which XLA runs as a scatter: a kernel would need a pool of
    another shape, and XLA copies a pool that is reshaped around a call that updates it in place.
    """
    if _backends.uses_reference(NAME, params.backend, platform):
        return None
    _backends.require_index_append(platform, types.k.shape[-1])
    if types.layer.ndim > 1:
        return None
    return FfiCall(
        target="jax_mla_index_append",
        attrs={
            "has_layer": np.bool_(params.has_layer),
            "power_of_two_scales": np.bool_(params.power_of_two_scales),
            "norm_eps": np.float32(params.norm_eps),
            "rope_interleaved": np.bool_(params.rope_interleaved),
            "rope_last": np.bool_(params.rope_last),
        },
        aliases={"index_pages": 0},
    )


def batch(
    operands: Operands, dims: Operands, size: int, params: Params
) -> tuple[Operands, list[int], Params]:
    """Add one mapped axis, in front of all operands."""
    return _primitive.insert_axes(operands, dims, size, shared=SHARED), [0], params


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
        take_rows=exchange,
    )
)

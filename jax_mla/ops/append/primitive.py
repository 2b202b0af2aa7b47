"""The primitive behind `append`: operand order, batching, sharding factors, lowering.

Operands: ckv [*groups, batch, q_len, d_ckv], kpe [*groups, batch, q_len, d_kpe],
page_table [*groups, batch, max_pages_per_seq], positions [*groups, batch, q_len], layer and
page_begin (as many dimensions as *groups and one; each 1 or the same), then the pools
[*groups, (num_layers,) num_pages, page_size, d]. A plain call has no groups; every `vmap` adds one,
to the pools too: each mapped call returns a cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla import _backends, _primitive, _sharding
from jax_mla.ops.append import reference

NAME = "jax_mla.append"
OPERANDS = ("ckv", "kpe", "page_table", "positions", "layer", "page_begin", "kv_pages", "kpe_pages")
PAGE_BEGIN = OPERANDS.index("page_begin")
FIRST_POOL = OPERANDS.index("kv_pages")
Params = dict[str, Any]


def results(avals: Sequence[Any], params: Params) -> list[jax.ShapeDtypeStruct]:
    """The pools keep their shapes and dtypes."""
    del params
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals[FIRST_POOL:]]


def factors(shapes: Sequence[Any], params: Params) -> tuple[list[list[str]], list[list[str]]]:
    """Name the dimensions that are split alike; see `_sharding.py`.

    New rows go to every device, which keeps those whose page it owns: the batch is `rows`.
    """
    del params
    groups = [f"groups{i}" for i in range(len(shapes[3]) - 2)]
    pools = _sharding.pool_factors(groups, shapes[FIRST_POOL:])
    scalar = [*groups, "whole_batch"]
    rows = [*groups, "rows"]
    operands = [
        [*rows, "whole_qlen", "whole_dckv"],
        [*rows, "whole_qlen", "whole_dkpe"],
        [*rows, "whole_maxpages"],
        [*rows, "whole_qlen"],
        _sharding.scalar_factors(scalar, shapes[4], "layer"),
        _sharding.scalar_factors(scalar, shapes[5], "pagebegin"),
        *pools,
    ]
    return operands, pools


def local(bind: Any, operands: Sequence[jax.Array], params: Params) -> list[jax.Array]:
    """Call the handler on one device's blocks.

    With groups this is a scatter of XLA's, which works in place on a pool of any rank; the handler
    would need the pool reshaped, and XLA copies a pool that is reshaped around an aliased call.
    """
    groups = operands[0].shape[:-3]
    if not groups:
        return bind(*operands, **params)
    operands = [
        jnp.broadcast_to(x, (*groups, 1)) if i in (4, 5) else x for i, x in enumerate(operands)
    ]

    def scatter(*args: jax.Array) -> list[jax.Array]:
        return run_reference(args, params)

    for _ in groups:
        scatter = jax.vmap(scatter)
    return scatter(*operands)


def exchange(operands: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """Give every device the whole batch's new rows: one all-gather of the rows and their slots.

    Each device looks up its own sequences' slots first, so that the page table, which is far larger
    than the new rows when sequences are long, stays where it is.
    """
    ckv, kpe, page_table, positions, *rest = operands
    page_size = rest[2].shape[-2]
    d_ckv, d_kpe, max_pages = ckv.shape[-1], kpe.shape[-1], page_table.shape[-1]
    place = positions // page_size
    valid = (positions >= 0) & (place < max_pages)
    page = jnp.take_along_axis(page_table, jnp.clip(place, 0, max_pages - 1), axis=-1)
    # The new table has one page a token; token i's place in it is i.
    token = lax.broadcasted_iota(jnp.int32, positions.shape, positions.ndim - 1)
    slot = jnp.where(valid, token * page_size + positions % page_size, -1)

    bits = jnp.uint32 if ckv.dtype.itemsize == 4 else jnp.uint16
    index = lax.bitcast_convert_type(jnp.stack([page, slot], axis=-1), bits)
    index = index.reshape(*page.shape, -1)
    rows = [lax.bitcast_convert_type(x, bits) for x in (ckv, kpe)]
    packed = jnp.concatenate([*rows, index], axis=-1)
    packed = lax.all_gather(packed, axes, axis=packed.ndim - 3, tiled=True)

    ckv, kpe = (
        lax.bitcast_convert_type(x, ckv.dtype)
        for x in (packed[..., :d_ckv], packed[..., d_ckv : d_ckv + d_kpe])
    )
    index = packed[..., d_ckv + d_kpe :]
    if bits == jnp.uint16:
        index = index.reshape(*index.shape[:-1], 2, 2)
    index = lax.bitcast_convert_type(index, jnp.int32)
    return [ckv, kpe, index[..., 0], index[..., 1], *rest]


def run_reference(operands: Sequence[jax.Array], params: Params) -> list[jax.Array]:
    """The reference on the inner primitive's operands."""
    del params
    ckv, kpe, page_table, positions, layer, page_begin, *pools = operands
    new = reference.append(
        pools[0] if len(pools) == 1 else (pools[0], pools[1]),
        ckv,
        kpe,
        page_table,
        positions,
        layer=layer[0],
        page_begin=page_begin[0],
    )
    return list(new) if isinstance(new, tuple) else [new]


def ffi(platform: str, avals: Sequence[Any], params: Params) -> _primitive.FfiCall | None:
    """Choose the custom call for a platform, or None for the reference."""
    if _backends.uses_reference(NAME, params["backend"], platform):
        return None
    _backends.require_append(platform, avals[FIRST_POOL].dtype)
    num_pools = len(avals) - FIRST_POOL
    return _primitive.FfiCall(
        target="jax_mla_append",
        attrs={},
        aliases={FIRST_POOL + i: i for i in range(num_pools)},
    )


def batch(
    operands: Sequence[jax.Array], dims: Sequence[int | None], size: int, params: Params
) -> tuple[list[jax.Array], list[int], Params]:
    """Add one mapped axis, in front, to everything; see the top of this file."""
    moved = []
    for i, (x, dim) in enumerate(zip(operands, dims, strict=True)):
        if dim is not None:
            moved.append(jnp.moveaxis(x, dim, 0))
        else:
            repeats = 1 if i in (4, 5) else size  # layer and page_begin broadcast by themselves
            moved.append(jnp.broadcast_to(x[None], (repeats, *x.shape)))
    return moved, [0] * (len(operands) - FIRST_POOL), params


bind = _primitive.define(
    _primitive.Op(
        name=NAME,
        results=results,
        local=local,
        reference=run_reference,
        ffi=ffi,
        batch=batch,
        operand_names=OPERANDS,
        factors=factors,
        page_begin=PAGE_BEGIN,
        first_pool=FIRST_POOL,
        exchange=exchange,
    )
)

"""The primitive behind `decode`: operand order, batching, sharding factors, lowering.

Operands: q_nope [*batch, q_len, *heads, d_ckv], q_pe [*batch, q_len, *heads, d_kpe],
page_table [*batch, max_pages_per_seq], seq_lens [*batch], layer and page_begin (as many dimensions
as *batch, each 1 or the batch's), then the pools [*groups, (num_layers,) num_pages, page_size, d].
A plain call has one batch and one heads dimension and no groups; every `vmap` adds one: to heads if
only the query is mapped (the cache is then read once), to batch otherwise, and to groups too if the
pools are mapped. Nothing is folded before the sharding is known, so a sharded mapped axis costs
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_mla import _backends, _primitive, _sharding
from jax_mla.kv_cache import fold_groups, local_pages
from jax_mla.ops.decode import reference

NAME = "jax_mla.decode"
OPERANDS = (
    "q_nope",
    "q_pe",
    "page_table",
    "seq_lens",
    "layer",
    "page_begin",
    "kv_pages",
    "kpe_pages",
)
PAGE_BEGIN = OPERANDS.index("page_begin")
FIRST_POOL = OPERANDS.index("kv_pages")
Params = dict[str, Any]


def results(avals: Sequence[Any], params: Params) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of out and lse."""
    del params
    q_nope = avals[0]
    return [
        jax.ShapeDtypeStruct(q_nope.shape, q_nope.dtype),
        jax.ShapeDtypeStruct(q_nope.shape[:-1], jnp.float32),
    ]


def factors(shapes: Sequence[Any], params: Params) -> tuple[list[list[str]], list[list[str]]]:
    """Name the dimensions that are split alike; see `_sharding.py`."""
    batch = [f"batch{i}" for i in range(len(shapes[3]))]
    heads = [f"heads{i}" for i in range(len(shapes[0]) - len(batch) - 2)]
    query = [*batch, "whole_qlen", *heads]
    groups = [batch[i] for i in params["pool_dims"]]

    operands = [
        [*query, "whole_dckv"],
        [*query, "whole_dkpe"],
        [*batch, "whole_maxpages"],
        batch,
        _sharding.scalar_factors(batch, shapes[4], "layer"),
        _sharding.scalar_factors(batch, shapes[5], "pagebegin"),
        *_sharding.pool_factors(groups, shapes[FIRST_POOL:]),
    ]
    return operands, [[*query, "whole_dckv"], query]


def local(bind: Any, operands: Sequence[jax.Array], params: Params) -> list[jax.Array]:
    """Fold the batch, head and group dimensions of one device's blocks, and call the handler."""
    q_nope, q_pe, page_table, seq_lens, layer, page_begin, *pools = operands
    inner = {k: v for k, v in params.items() if k != "pool_dims"}
    batch, heads = seq_lens.shape, q_nope.shape[seq_lens.ndim + 1 : -1]
    q_len = q_nope.shape[seq_lens.ndim]
    pools, page_table, layer, page_begin = fold_groups(
        pools, page_table, layer, page_begin, params["pool_dims"]
    )
    if len(batch) == 1 and len(heads) == 1:  # spares symbolic dimensions the products below
        return bind(q_nope, q_pe, page_table, seq_lens, layer, page_begin, *pools, **inner)
    rows = (math.prod(batch), q_len, math.prod(heads))
    out, lse = bind(
        q_nope.reshape(*rows, q_nope.shape[-1]),
        q_pe.reshape(*rows, q_pe.shape[-1]),
        page_table,
        seq_lens.reshape(-1),
        layer,
        page_begin,
        *pools,
        **inner,
    )
    return [out.reshape(q_nope.shape), lse.reshape(q_nope.shape[:-1])]


def keep_owned_pages(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Shorten every sequence to the pages that the pool holds, so that the rest costs nothing.

    Absent pages are no keys, but a kernel still has to walk past them: a device that holds a
    quarter of the pages would take as long as one that holds all. Keys may close up, since only
    their order against the queries matters; so the pages of the last q_len tokens stay, owned or
    not, and with them the causal mask. Nothing here differs between layers: XLA computes it once.
    """
    q_nope, q_pe, page_table, seq_lens, layer, page_begin, *pools = operands
    num_pages, page_size = pools[0].shape[-3:-1]
    max_pages, q_len = page_table.shape[-1], q_nope.shape[seq_lens.ndim]
    capacity = max_pages * page_size
    if isinstance(capacity, int):
        capacity = min(capacity, np.iinfo(np.int32).max)
    lens = jnp.clip(seq_lens, 0, capacity)
    batch = range(seq_lens.ndim)
    place = jnp.arange(max_pages, dtype=jnp.int32).reshape(*(1 for _ in batch), max_pages)
    _, owned = local_pages(page_table, page_begin[..., None], num_pages)
    last = jnp.maximum(lens - q_len, 0) // page_size  # first page that stays, owned or not
    used = place < -(-lens // page_size)[..., None]
    keep = used & (owned | (place >= last[..., None]))
    target = jnp.where(keep, jnp.cumsum(keep, axis=-1, dtype=jnp.int32) - 1, max_pages + place)
    # No vmap of a one-dimensional scatter: under another vmap with spmd_axis_name JAX mistypes it.
    along_last = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(seq_lens.ndim,),
        scatter_dims_to_operand_dims=(seq_lens.ndim,),
        operand_batching_dims=tuple(batch),
        scatter_indices_batching_dims=tuple(batch),
    )
    closed_up = lax.scatter(
        jnp.full_like(page_table, -1),
        target[..., None],
        page_table,
        along_last,
        unique_indices=True,
        mode="drop",
    )
    dropped = jnp.sum(used & ~keep, axis=-1, dtype=jnp.int32)  # whole pages, all of them
    return [
        q_nope,
        q_pe,
        closed_up,
        lens - dropped * page_size,
        layer,
        page_begin,
        *pools,
    ]


def run_reference(operands: Sequence[jax.Array], params: Params) -> list[jax.Array]:
    """The reference on the inner primitive's operands."""
    q_nope, q_pe, page_table, seq_lens, layer, page_begin, *pools = operands
    out, lse = reference.decode(
        q_nope,
        q_pe,
        pools[0] if len(pools) == 1 else (pools[0], pools[1]),
        page_table,
        seq_lens,
        sm_scale=params["sm_scale"],
        layer=layer[0],
        causal=params["causal"],
        return_lse=True,
        page_begin=page_begin[0],
    )
    return [out.astype(q_nope.dtype), lse]


def ffi(platform: str, avals: Sequence[Any], params: Params) -> _primitive.FfiCall | None:
    """Choose the custom call for a platform, or None for the reference."""
    if _backends.uses_reference(NAME, params["backend"], platform):
        return None
    call = _backends.DecodeCall.of(avals, params)
    _backends.require(platform, call, params["backend"])
    return _primitive.FfiCall(
        target="jax_mla_decode",
        attrs={
            "sm_scale": np.float32(params["sm_scale"]),
            "causal": np.bool_(params["causal"]),
            "num_splits": np.int64(params["num_splits"]),
            "batch_invariant": np.bool_(params["batch_invariant"]),
            "backend": params["backend"],
        },
        aliases={},
        scratch_shape=_backends.scratch_shape(call) if platform == "cuda" else None,
    )


def batch(
    operands: Sequence[jax.Array], dims: Sequence[int | None], size: int, params: Params
) -> tuple[list[jax.Array], list[int], Params]:
    """Add one mapped axis; see the top of this file."""
    if all(d is None for d in dims[2:]):
        axis = operands[0].ndim - (dims[0] is not None) - 1  # before d_ckv
        query = [insert_axis(x, d, size, axis) for x, d in zip(operands[:2], dims[:2], strict=True)]
        return [*query, *operands[2:]], [axis, axis], params
    rows = [insert_axis(x, d, size, 0) for x, d in zip(operands[:4], dims[:4], strict=True)]
    scalars = [
        insert_axis(x, d, 1 if d is None else size, 0)
        for x, d in zip(operands[4:6], dims[4:6], strict=True)
    ]
    pools, mapped = batch_pools(operands[6:], dims[6:], size)
    pool_dims = tuple(i + 1 for i in params["pool_dims"])
    return (
        [*rows, *scalars, *pools],
        [0, 0],
        params | {"pool_dims": (0, *pool_dims) if mapped else pool_dims},
    )


def insert_axis(x: jax.Array, dim: int | None, size: int, axis: int) -> jax.Array:
    """Move the mapped axis of `x` to `axis`, or repeat `x` along a new one."""
    if dim is not None:
        return jnp.moveaxis(x, dim, axis)
    x = jnp.expand_dims(x, axis)
    return jnp.broadcast_to(x, (*x.shape[:axis], size, *x.shape[axis + 1 :]))


def batch_pools(
    pools: Sequence[jax.Array], dims: Sequence[int | None], size: int
) -> tuple[list[jax.Array], bool]:
    """Add the mapped axis to the pools, if it has one."""
    if all(d is None for d in dims):
        return list(pools), False
    return [insert_axis(p, d, size, 0) for p, d in zip(pools, dims, strict=True)], True


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
        keep_owned=keep_owned_pages,
    )
)

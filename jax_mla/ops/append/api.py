# ruff: noqa: F722, F821
"""Public `append`: write new tokens into the paged latent cache, in place under donation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from jax_mla import _backends, _dispatch
from jax_mla._mesh_axes import MeshAxes
from jax_mla.kv_cache import Cache, as_pools, check_format, like
from jax_mla.ops import _checks
from jax_mla.ops.append import primitive

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

OP = primitive.NAME


def append(
    kv_pages: Cache,
    ckv: Float[Array, "batch q_len d_ckv"],
    kpe: Float[Array, "batch q_len d_kpe"],
    page_table: Int[Array, "batch max_pages_per_seq"],
    positions: Int[Array, "batch q_len"],
    *,
    layer: Array | int | None = None,
    kv_format: str | None = None,
    kv_scale: Array | None = None,
    page_begin: Array | int | None = None,
    mesh: Mesh | MeshAxes | None = None,
    backend: str | None = None,
) -> Cache:
    """Write new tokens into the cache; the same buffer comes back if it was donated.

    Definition: token i of sequence b at p = positions[b, i] goes to row p % page_size of page
    page_table[b, p // page_size]; see `jax_mla.reference.append`. Donate the pool
    (`jax.jit(step, donate_argnums=...)`), and in a layer scan carry the whole stacked pool: then
    nothing of the cache's size is copied. Without donation XLA makes exactly one copy.

    Args:
      kv_pages: a pool [num_pages, page_size, d_ckv + d_kpe], a stacked one
        [num_layers, num_pages, ...] with `layer`, or a pair (ckv, kpe) of either.
      ckv: dtype of the pool. New latents.
      kpe: dtype of the pool. New rotated keys.
      page_table: int32, global page ids.
      positions: int32, place of each token in its sequence; negative skips the token. One past the
        table is an error if it is a numpy array and dropped otherwise. Two tokens for one slot:
        either may win.
      layer: which layer of a stacked pool; may live on the device.
      kv_format: name of the cache's format; None means the pool's own dtype.
      kv_scale: scale of a quantised format; required by formats that need one.
      page_begin: global id of the pool's first page, see `decode`; tokens for other pages are
        dropped.
      mesh: see `decode`.
      backend: None picks the platform's handler; "reference" is the jax.numpy definition. The other
        names of `decode`, with a variant or without, are accepted and mean the handler too.

    Returns:
      The cache, in the form of kv_pages.

    Raises:
      TypeError: a wrong dtype, or something that is no array.
      ValueError: shapes, values or shardings that do not fit, while tracing or lowering.
      jax.errors.JaxRuntimeError: while compiling, a sharding on Auto axes that cannot be served,
        with the ValueError's message in it, since only the compiler knows it.
      NotImplementedError: when differentiated.
    """
    given = positions
    ckv, kpe = _checks.array(OP, "ckv", ckv), _checks.array(OP, "kpe", kpe)
    page_table = _checks.array(OP, "page_table", page_table, _checks.INDICES)
    positions = _checks.array(OP, "positions", positions, _checks.INDICES)
    pools = [_checks.array(OP, "kv_pages", p) for p in as_pools(OP, kv_pages)]
    _check(pools, ckv, kpe, page_table, positions, layer)
    capacity = page_table.shape[1] * pools[0].shape[-2]
    _checks.values(OP, "positions", given, -(2**31), capacity, "places that page_table has")
    check_format(OP, kv_format, kv_scale, pools[0].dtype)
    if mesh is None:
        _dispatch.check_pools(OP, pools)
    num_layers = pools[0].shape[0] if pools[0].ndim == 4 else 1
    operands = primitive.Operands(
        ckv,
        kpe,
        page_table,
        positions,
        _checks.scalar(OP, "layer", 0 if layer is None else layer, num_layers),
        _checks.scalar(OP, "page_begin", 0 if page_begin is None else page_begin, 2**31),
        tuple(pools),
    )
    attr = _backends.check_name(OP, backend)
    return like(kv_pages, primitive.bind(operands, primitive.Params(attr), mesh=mesh))


def _check(
    pools: list[jax.Array],
    ckv: jax.Array,
    kpe: jax.Array,
    page_table: jax.Array,
    positions: jax.Array,
    layer: object,
) -> None:
    _checks.rank(OP, "ckv", ckv, (3,), "[batch, q_len, d_ckv]")
    _checks.dtype(OP, "ckv", ckv, _checks.FLOATS)
    _checks.shape(OP, "kpe", kpe, (*ckv.shape[:-1], None), " as in ckv")
    _checks.dtype(OP, "kpe", kpe, (ckv.dtype.name,), " as in ckv")
    _checks.shape(OP, "page_table", page_table, (ckv.shape[0], None), " with ckv's batch")
    _checks.dtype(OP, "page_table", page_table, _checks.INDICES)
    _checks.shape(OP, "positions", positions, ckv.shape[:2], " as in ckv")
    _checks.dtype(OP, "positions", positions, _checks.INDICES)
    if 0 in (*ckv.shape, *kpe.shape, *page_table.shape):
        raise ValueError(
            f"{OP}: ckv, kpe, page_table: expected no dimension of size 0, got {ckv.shape}, "
            f"{kpe.shape}, {page_table.shape}"
        )
    _checks.pools(OP, pools, ckv.shape[-1], kpe.shape[-1], ckv.dtype, layer is not None)

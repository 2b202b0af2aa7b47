"""The public function `append`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypedDict, Unpack, overload

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jax_mla._mesh import _dispatch
from jax_mla._mesh._mesh_axes import MeshAxes
from jax_mla._runtime import _backends
from jax_mla.kv_cache import (
    Cache,
    KvFormat,
    KvScale,
    as_pools,
    find_format,
    like,
    pool_sizes,
    stored_format,
    width,
)
from jax_mla.ops import _checks, _eager, _ragged
from jax_mla.ops.append import checks, primitive

OP = primitive.NAME


class AppendOptions(TypedDict, total=False):
    """The optional arguments of `append` that do not change the type of its result."""

    cu_q_lens: Array | None
    layer: Array | int | None
    packs: bool
    kv_format: str | None
    kv_scale: KvScale | None
    norm_weight: Array | None
    norm_eps: float
    rope_table: Array | None
    rope_interleaved: bool | None
    page_begin: Array | int | None
    mesh: Mesh | MeshAxes | None
    backend: str | None


@overload
def append(
    kv_pages: Cache, ckv: Array, kpe: Array | None, page_table: Array, positions: Array, *,
    q_pe: None = ..., **options: Unpack[AppendOptions],
) -> Cache: ...  # fmt: skip
@overload
def append(
    kv_pages: Cache, ckv: Array, kpe: Array | None, page_table: Array, positions: Array, *,
    q_pe: Array, **options: Unpack[AppendOptions],
) -> tuple[Array, Cache]: ...  # fmt: skip
def append(
    kv_pages: Cache,
    ckv: Annotated[Array, "[batch, q_len, d_ckv], [batch, d_ckv] or [tokens, d_ckv]"],
    kpe: Annotated[Array | None, "[batch, q_len, d_kpe], [batch, d_kpe] or [tokens, d_kpe]"],
    page_table: Annotated[Array, "[batch, max_pages_per_seq] int32"],
    positions: Annotated[Array, "[batch, q_len], [batch] or [tokens] int32"],
    *,
    cu_q_lens: Annotated[Array, "[batch + 1] int32"] | None = None,
    layer: Array | int | None = None,
    packs: bool = False,
    kv_format: str | None = None,
    kv_scale: KvScale | None = None,
    norm_weight: Annotated[Array, "[d_ckv]"] | None = None,
    norm_eps: float = 1e-6,
    rope_table: Annotated[Array, "[num_positions, d_kpe] float32"] | None = None,
    rope_interleaved: bool | None = None,
    q_pe: Annotated[Array, "[*tokens, num_heads, d_kpe]"] | None = None,
    page_begin: Array | int | None = None,
    mesh: Mesh | MeshAxes | None = None,
    backend: str | None = None,
) -> Cache | tuple[Array, Cache]:
    """Write new tokens into the paged latent cache.

    Token i of sequence b, at position p = positions[b, i], goes to row p % page_size of page
    page_table[b, p // page_size]. `jax_mla.reference.append` defines this in jax.numpy.

    With `cu_q_lens` the sequences may have different numbers of new tokens, which lie end to end:
    sequence b has the tokens from cu_q_lens[b] to cu_q_lens[b + 1]. Tokens that belong to no
    sequence are skipped. To append and attend in one call, see `ragged_paged_attention`.

    On the way into the cache a row may be normalised (`norm_weight`) and rotated (`rope_table`), so
    that ckv and kpe can be the raw projection. `jax_mla.reference.rms_norm` and `rotate` define it.
    XLA sums squares in another order and fuses products with sums. So a value sometimes differs
    from the definition by one unit in its last place, and an 8-bit code by one.

    To update the cache in place, donate it: `jax.jit(step, donate_argnums=...)`. In a scan over
    layers, carry the whole stacked pool and pass `layer`. Then no part of the cache is copied.
    Without donation, and in an eager call, XLA makes one copy and the argument stays valid. Under
    `vmap` the definition runs as an XLA scatter, because a kernel would need a pool of another
    shape.

    Args:
      kv_pages: the cache. One pool [num_pages, page_size, d_ckv + d_kpe], or a tuple of two pools
        (ckv [num_pages, page_size, d_ckv], kpe [num_pages, page_size, d_kpe]); bfloat16, float16
        or, on the CPU, float32, or what kv_format says. With `layer` each pool has a leading
        dimension num_layers. The last dimension may be larger: the rest of a row is padding, which
        is never used. With `packs` page_size is two dimensions, page_size / pack and pack. See
        docs/cache_layouts.md.
      ckv: [batch, q_len, d_ckv], or [batch, d_ckv] for q_len 1; with cu_q_lens [tokens, d_ckv]. The
        new latents. Dtype of kv_pages; for an FP8 cache bfloat16, float16 or float32. If the cache
        stores both parts in float8_e4m3fn, also codes in float8_e4m3fn, which cannot be normalised
        or rotated.
      kpe: [batch, q_len, d_kpe], or [batch, d_kpe]; with cu_q_lens [tokens, d_kpe]. The new rotary
        keys, or None if the rows have no rotary part. Dtype of ckv.
      page_table: [batch, max_pages_per_seq] int32. The pages of each sequence in order, as for
        `decode`. A global id outside [0, num_pages) is an error where a token is written, if this,
        positions and cu_q_lens are numpy arrays and there is no page_begin; in a JAX array the
        token is skipped.
      positions: [batch, q_len] int32, or [batch]; with cu_q_lens [tokens]. Position of each token
        in its sequence, from 0. A negative position skips the token. A position past the page table
        is an error in a numpy array (if cu_q_lens is not a JAX array); in a JAX array, such as any
        argument of a jitted function, it skips the token. If two tokens go to the same row, either
        may win.
      cu_q_lens: [batch + 1] int32, or None. In a numpy array, values that decrease or lie outside
        [0, tokens] are an error. In a JAX array, the tokens of sequence b end at the largest of
        cu_q_lens[0] to cu_q_lens[b + 1], clipped to [0, tokens], and the next sequence's begin
        there. On a mesh every device gets all tokens, unless page ids are local: then each group
        has its part of the tokens and its own bounds [batch / groups + 1], which start at 0 in that
        part. The bounds of the groups lie end to end.
      layer: which layer of a stacked pool, an int or an int32 scalar. An int outside
        [0, num_layers) is an error. A JAX scalar outside it selects no layer: nothing is written.
      packs: whether the pages of the pool are cut into packs, as for `decode`.
      kv_format: name of the format in which the cache is stored, see `decode`; None for its dtype.
        For an FP8 format values are rounded to nearest even and clamped to +-448 times the scale; a
        NaN becomes 0.
      kv_scale: scale of a cache in "fp8_e4m3", see `decode`. Values are multiplied by 1 / kv_scale
        in float32. In "fp8_ds_mla" each row gets scales of its own.
      norm_weight: [d_ckv], bfloat16, float16 or float32. ckv is divided by its root mean square and
        multiplied by this, see `jax_mla.reference.rms_norm`. None: ckv is written unchanged.
      norm_eps: added to the mean square by the norm, a Python number.
      rope_table: [num_positions, d_kpe] float32, see `jax_mla.rope_table`. kpe is rotated by the
        angles of its position, see `jax_mla.reference.rotate`. None: kpe is written unchanged. A
        position past the table is an error in a numpy array, and takes the last row in a JAX array.
      rope_interleaved: whether the two values of a pair are adjacent, see
        `jax_mla.reference.rotate`. Required with rope_table: True for the published weights of
        DeepSeek, Kimi and GLM-5, False for MiniCPM3.
      q_pe: [batch, q_len, num_heads, d_kpe], [batch, num_heads, d_kpe] or, with cu_q_lens, [tokens,
        num_heads, d_kpe], dtype of ckv. The rotary part of the queries, to be rotated in the same
        call; only with rope_table.
      page_begin: global id of the pool's first page, an int or an int32 scalar, see `decode`.
        Tokens for pages outside the pool are skipped.
      mesh: how to split the call if the argument types do not say, see `decode`.
      backend: "reference" for the definition in jax.numpy. None for the platform's kernel. The
        names of `decode`'s backends on that platform select the same kernel.

    Returns:
      q_pe: only if q_pe is given. The rotated queries; arbitrary for tokens that are skipped.
      kv_pages: the cache with the new tokens, in the form of kv_pages.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes, values or shardings do not fit. Raised while tracing or lowering.
      jax.errors.JaxRuntimeError: a sharding on Auto axes cannot be served, which shows only when
        the program is compiled.
      NotImplementedError: the call is differentiated.
    """
    table_as_given, positions_as_given, bounds_as_given = page_table, positions, cu_q_lens
    ckv = _checks.array(OP, "ckv", ckv)
    kpe = _checks.array_or_none(OP, "kpe", kpe)
    page_table = _checks.array(OP, "page_table", page_table, _checks.INDICES)
    positions = _checks.array(OP, "positions", positions, _checks.INDICES)
    pools = [_checks.array(OP, "kv_pages", pool) for pool in as_pools(OP, kv_pages)]
    is_ragged, has_layer = cu_q_lens is not None, layer is not None
    fmt = find_format(OP, kv_format)
    _check(
        pools, ckv, kpe, page_table, positions, is_ragged,
        has_layer=has_layer, packs=packs, fmt=fmt,
    )  # fmt: skip
    num_groups = 0
    if is_ragged:
        num_tokens, num_rows = ckv.shape[0], page_table.shape[0]
        num_groups = _ragged.num_groups(OP, mesh, num_tokens, num_rows)
        cu_q_lens = _checks.array(OP, "cu_q_lens", cu_q_lens, _checks.INDICES)
        _ragged.check(OP, bounds_as_given, None, num_rows, num_tokens, num_groups)
        positions_as_given = _ragged.of_sequences(positions_as_given, bounds_as_given, num_groups)
    sizes = pool_sizes(pools[0], has_layer)
    capacity = _checks.capacity(OP, "page_table", page_table, sizes.page_size)
    _checks.values(
        OP, "positions", positions_as_given, -(2**31), capacity, "places that page_table has"
    )
    if page_begin is None and not _dispatch.num_local_groups(OP, mesh):
        _ragged.check_written_pages(OP, table_as_given, positions_as_given, bounds_as_given, sizes)
    layer = _checks.index(OP, "layer", layer, sizes.num_layers)
    page_begin = _checks.index(OP, "page_begin", page_begin, 2**31)
    interleaved = checks.interleaved(OP, rope_interleaved, rope_table)
    norm_weight, rope_table = checks.transforms(OP, ckv, kpe, norm_weight, rope_table)
    norm_eps = checks.eps(OP, norm_eps)
    if rope_table is not None:
        what = "positions that rope_table (jax_mla.rope_table) has"
        _checks.values(OP, "positions", positions_as_given, -(2**31), rope_table.shape[0], what)
    if q_pe is not None:
        q_pe = _checks.array(OP, "q_pe", q_pe)
        _check_query(q_pe, ckv, kpe, rope_table)
    params = primitive.Params(
        backend=_backends.check_name(OP, backend, has_variants=False),
        has_layer=has_layer,
        has_local_pages=num_groups > 0,
        kv_format=stored_format(fmt, pools),
        norm_eps=0.0 if norm_weight is None else norm_eps,
        rope_interleaved=interleaved,
    )
    operands = primitive.Operands(
        ckv, kpe, page_table, positions, cu_q_lens, layer, page_begin,
        _checks.kv_scale(OP, fmt, kv_scale, pools, d_kpe=width(kpe)), norm_weight, rope_table,
        q_pe, tuple(pools),
    )  # fmt: skip
    results = _append(operands, params=params, mesh=mesh)
    if q_pe is None:
        return like(kv_pages, results)
    rotated, *new_pools = results
    return rotated, like(kv_pages, new_pools)


@_eager.compiled(OP)
def _append(
    operands: primitive.Operands, *, params: primitive.Params, mesh: Mesh | MeshAxes | None = None
) -> list[Array]:
    """Run the op on arguments that have been checked."""
    operands = _eager.with_scalar_arrays(operands)
    if operands.norm_weight is not None:  # exact: float32 holds all values of other dtypes
        operands = operands._replace(norm_weight=operands.norm_weight.astype(jnp.float32))
    if operands.ckv.ndim == 3 or operands.cu_q_lens is not None:
        return primitive.bind(operands, params, mesh=mesh)
    expanded = _eager.expanded(operands, ("ckv", "kpe", "positions", "q_pe"), (1,))
    results = primitive.bind(operands._replace(**expanded), params, mesh=mesh)
    if operands.q_pe is None:
        return results
    return [lax.squeeze(results[0], (1,)), *results[1:]]


def _check_query(q_pe: Array, ckv: Array, kpe: Array | None, rope_table: Array | None) -> None:
    if rope_table is None:
        raise ValueError(f"{OP}: q_pe: expected None without rope_table, got an array")
    expected = (*ckv.shape[:-1], None, width(kpe))
    _checks.shape(OP, "q_pe", q_pe, expected, ", the tokens of ckv and the width of kpe")
    _checks.dtype(OP, "q_pe", q_pe, (_checks.dtype_name(ckv.dtype),), " as in ckv")


def _check(
    pools: Sequence[Array],
    ckv: Array,
    kpe: Array | None,
    page_table: Array,
    positions: Array,
    is_ragged: bool,
    *,
    has_layer: bool,
    packs: bool,
    fmt: KvFormat | None,
) -> None:
    if is_ragged:
        _checks.rank(OP, "ckv", ckv, (2,), "[tokens, d_ckv] with cu_q_lens")
    else:
        _checks.rank(OP, "ckv", ckv, (2, 3), "[batch, q_len, d_ckv] or [batch, d_ckv]")
    _checks.numbers(OP, "ckv", ckv, takes_codes=_checks.takes_codes(fmt, pools))
    if kpe is not None:
        is_wider = ckv.shape[-1:] < kpe.shape[-1:]
        behind = ", behind the cache, which is the first argument" if is_wider else ""
        _checks.shape(OP, "kpe", kpe, (*ckv.shape[:-1], None), f" as in ckv{behind}")
        _checks.dtype(OP, "kpe", kpe, (_checks.dtype_name(ckv.dtype),), " as in ckv")
        _checks.rotary_part(OP, "kpe", kpe)
    if is_ragged:
        _checks.rank(OP, "page_table", page_table, (2,), "[batch, max_pages_per_seq]")
    else:
        _checks.shape(OP, "page_table", page_table, (ckv.shape[0], None), " with ckv's batch")
    _checks.dtype(OP, "page_table", page_table, _checks.INDICES)
    _checks.shape(OP, "positions", positions, ckv.shape[:-1], " as in ckv")
    _checks.dtype(OP, "positions", positions, _checks.INDICES)
    if 0 in (*ckv.shape, *page_table.shape):
        raise ValueError(
            f"{OP}: ckv, page_table: expected no dimension of size 0, got {ckv.shape}, "
            f"{page_table.shape}"
        )
    d_ckv, d_kpe = ckv.shape[-1], width(kpe)
    _checks.widths(OP, "ckv, kpe", d_ckv, d_kpe)
    _checks.pools(
        OP, pools, d_ckv, d_kpe, ckv.dtype, "ckv", has_layer=has_layer, packs=packs, fmt=fmt
    )

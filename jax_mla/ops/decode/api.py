# ruff: noqa: F722, F821
"""Public `decode`: paged MLA attention of a few query tokens a sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

import numpy as np
from jax import lax
from jax.sharding import Mesh

from jax_mla import _backends, _dispatch
from jax_mla._mesh_axes import MeshAxes
from jax_mla.kv_cache import KvPages, Shaped, as_pools, check_format
from jax_mla.ops import _checks
from jax_mla.ops.decode import primitive

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

OP = primitive.NAME
MAX_TOKENS_PER_SEQ = 2**30  # the kernels number a sequence's tokens in 32 bits
# Kernels multiply it by log2(e).
MAX_SCALE = float(np.finfo(np.float32).max) * math.log(2)


@overload
def decode(
    q_nope: Array, q_pe: Array, kv_pages: KvPages, page_table: Array, seq_lens: Array, *,
    sm_scale: float, layer: Array | int | None = ..., causal: bool = ...,
    return_lse: Literal[False] = ..., kv_format: str | None = ..., kv_scale: Array | None = ...,
    num_splits: int | None = ..., batch_invariant: bool = ..., page_begin: Array | int | None = ...,
    mesh: Mesh | MeshAxes | None = ..., backend: str | None = ...,
) -> Array: ...  # fmt: skip
@overload
def decode(
    q_nope: Array, q_pe: Array, kv_pages: KvPages, page_table: Array, seq_lens: Array, *,
    sm_scale: float, layer: Array | int | None = ..., causal: bool = ...,
    return_lse: Literal[True], kv_format: str | None = ..., kv_scale: Array | None = ...,
    num_splits: int | None = ..., batch_invariant: bool = ..., page_begin: Array | int | None = ...,
    mesh: Mesh | MeshAxes | None = ..., backend: str | None = ...,
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def decode(
    q_nope: Array, q_pe: Array, kv_pages: KvPages, page_table: Array, seq_lens: Array, *,
    sm_scale: float, layer: Array | int | None = ..., causal: bool = ...,
    return_lse: bool, kv_format: str | None = ..., kv_scale: Array | None = ...,
    num_splits: int | None = ..., batch_invariant: bool = ..., page_begin: Array | int | None = ...,
    mesh: Mesh | MeshAxes | None = ..., backend: str | None = ...,
) -> Array | tuple[Array, Array]: ...  # fmt: skip
def decode(
    q_nope: Float[Array, "batch q_len num_heads d_ckv"] | Float[Array, "batch num_heads d_ckv"],
    q_pe: Float[Array, "batch q_len num_heads d_kpe"] | Float[Array, "batch num_heads d_kpe"],
    kv_pages: KvPages,
    page_table: Int[Array, "batch max_pages_per_seq"],
    seq_lens: Int[Array, " batch"],
    *,
    sm_scale: float,
    layer: Array | int | None = None,
    causal: bool = True,
    return_lse: bool = False,
    kv_format: str | None = None,
    kv_scale: Array | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    page_begin: Array | int | None = None,
    mesh: Mesh | MeshAxes | None = None,
    backend: str | None = None,
) -> Array | tuple[Array, Array]:
    """Attend from each sequence's last tokens to its paged latent cache.

    Definition: out = softmax(sm_scale * (q_nope . ckv + q_pe . kpe)) . ckv over the visible tokens
    t < seq_lens[b]; see `jax_mla.reference.decode`. Works under jit, vmap and scan, and on any
    mesh: sequences, heads and the pages of the cache may be sharded (docs/sharding.md).

    Args:
      q_nope: bf16, f16 (f32 on CPU). Query after absorbing W_UK. Rank 3 means q_len = 1.
      q_pe: dtype of q_nope. Rotated part of the query.
      kv_pages: dtype of q_nope. A pool [num_pages, page_size, d_ckv + d_kpe], a stacked one
        [num_layers, num_pages, ...] with `layer`, or a pair (ckv, kpe) of either.
      page_table: int32, global page ids. Entries past a sequence's length are never used. Its width
        bounds the lengths, to at most 2^30 tokens, and backends choose by it: where a step's
        longest sequence is known to be short, a slice of the table is up to a fifth faster at
        batch 1 to 4.
      seq_lens: int32, tokens in the cache including the q_len new ones. 0 is legal. Checked if
        it is a numpy array; on the device, values outside [0, max_pages_per_seq * page_size]
        are clamped.
      sm_scale: factor on the scores, a Python number; times log2(e) it is finite in float32.
      layer: which layer of a stacked pool; may live on the device.
      causal: mask aligned to the end: query i sees t <= seq_lens[b] - q_len + i.
      return_lse: also return the log-sum-exp of the scores.
      kv_format: name of the cache's format; None means the pool's own dtype.
      kv_scale: scale of a quantised format; required by formats that need one.
      num_splits: at most this many parts a sequence's keys are split into; None chooses.
      batch_invariant: make each sequence's result independent, bit for bit, of the others; so does
        every backend but the reference, which ignores this and num_splits.
      page_begin: global id of the pool's first page, for context parallelism written by hand in a
        `shard_map`; merge the results with `jax_mla.merge(..., axis_name=)`. Pages outside the pool
        are absent keys.
      mesh: how to shard where the types do not say (Auto axes): a mesh with the axis names dp
        (sequences), tp (heads), cp (pages), or a `MeshAxes`. Uses `shard_map`, so it can be
        exported.
      backend: None picks the first that takes the call; see `jax_mla.backends`. "reference" is
        the float32 definition. "name:variant" forces one kernel of a CUDA backend, for tests.

    Returns:
      out: shape and dtype of q_nope; 0 for a row with no visible token.
      lse: if return_lse, out's shape without the last dimension, float32, natural logarithm; -inf
        for a row with no visible token.

    Raises:
      TypeError: a wrong dtype, or something that is no array.
      ValueError: shapes, values or shardings that do not fit, or no backend takes the call: the
        message lists each backend's reason. All of it while tracing or lowering.
      jax.errors.JaxRuntimeError: while compiling, a sharding on Auto axes that cannot be served,
        with the ValueError's message in it, since only the compiler knows it. On CUDA, when the
        call runs: the backend has no such variant, or one device's part has page tables for more
        than 2^36 tokens (sm80: a pool of over 2^31).
      NotImplementedError: when differentiated.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; splits: Flash-Decoding.
    """
    given = seq_lens
    with_lse = _flag(OP, "return_lse", return_lse)
    q_nope = _checks.array(OP, "q_nope", q_nope)
    q_pe = _checks.array(OP, "q_pe", q_pe)
    page_table = _checks.array(OP, "page_table", page_table, _checks.INDICES)
    seq_lens = _checks.array(OP, "seq_lens", seq_lens, _checks.INDICES)
    pools = [_checks.array(OP, "kv_pages", p) for p in as_pools(OP, kv_pages)]
    _check(OP, q_nope, q_pe, pools, page_table, layer is not None)
    _checks.shape(OP, "seq_lens", seq_lens, (q_nope.shape[0],), " with q_nope's batch")
    _checks.dtype(OP, "seq_lens", seq_lens, _checks.INDICES)
    capacity = page_table.shape[1] * pools[0].shape[-2]
    _checks.values(OP, "seq_lens", given, 0, capacity + 1, "lengths that fit page_table")
    check_format(OP, kv_format, kv_scale, pools[0].dtype)
    if mesh is None:
        _dispatch.check_pools(OP, pools)
    num_layers = pools[0].shape[0] if pools[0].ndim == 4 else 1
    params = {
        "sm_scale": _scale(sm_scale),
        "causal": _flag(OP, "causal", causal),
        "num_splits": _splits(OP, num_splits),
        "batch_invariant": _flag(OP, "batch_invariant", batch_invariant),
        "backend": _backends.check_name(OP, backend),
        "pool_dims": (),
    }
    squeeze = q_nope.ndim == 3
    if squeeze:
        q_nope, q_pe = lax.expand_dims(q_nope, (1,)), lax.expand_dims(q_pe, (1,))
    operands = primitive.Operands(
        q_nope,
        q_pe,
        page_table,
        seq_lens,
        _checks.scalar(OP, "layer", 0 if layer is None else layer, num_layers),
        _checks.scalar(OP, "page_begin", 0 if page_begin is None else page_begin, 2**31),
        tuple(pools),
    )
    if page_begin is not None:
        operands = primitive.keep_owned_pages(operands)
    out, lse = primitive.bind(operands, primitive.Params(**params), mesh=mesh)
    if squeeze:
        out, lse = lax.squeeze(out, (1,)), lax.squeeze(lse, (1,))
    return (out, lse) if with_lse else out


def _check(
    op: str,
    q_nope: Shaped,
    q_pe: Shaped,
    pools: Sequence[Shaped],
    page_table: Shaped,
    has_layer: bool,
) -> None:
    dims = "[batch, q_len, num_heads, d_ckv] or [batch, num_heads, d_ckv]"
    _checks.rank(op, "q_nope", q_nope, (3, 4), dims)
    _checks.dtype(op, "q_nope", q_nope, _checks.FLOATS)
    _checks.shape(op, "q_pe", q_pe, (*q_nope.shape[:-1], None), " as in q_nope")
    _checks.dtype(op, "q_pe", q_pe, (np.dtype(q_nope.dtype).name,), " as in q_nope")
    _checks.shape(op, "page_table", page_table, (q_nope.shape[0], None), " with q_nope's batch")
    _checks.dtype(op, "page_table", page_table, _checks.INDICES)
    _checks.pools(op, pools, q_nope.shape[-1], q_pe.shape[-1], q_nope.dtype, has_layer)
    capacity = page_table.shape[1] * pools[0].shape[-2]
    if isinstance(capacity, int) and capacity > MAX_TOKENS_PER_SEQ:
        raise ValueError(
            f"{op}: page_table: expected places for at most 2^30 tokens a sequence, got {capacity}"
        )
    if 0 in (*q_nope.shape, *q_pe.shape, *page_table.shape):
        raise ValueError(
            f"{op}: q_nope, q_pe, page_table: expected no dimension of size 0, got "
            f"{q_nope.shape}, {q_pe.shape}, {page_table.shape}"
        )


def _scale(sm_scale: float) -> float:
    if not isinstance(sm_scale, float | int | np.floating | np.integer):
        raise TypeError(f"{OP}: sm_scale: expected a Python number, got {type(sm_scale).__name__}")
    try:
        value = float(sm_scale)
    except OverflowError:
        value = math.inf
    if not abs(value) <= MAX_SCALE:
        raise ValueError(
            f"{OP}: sm_scale: expected a number of at most {MAX_SCALE:.3g} either way, got {value}"
        )
    return value


def _flag(op: str, name: str, value: bool) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{op}: {name}: expected a bool, got {type(value).__name__}")
    return bool(value)


def _splits(op: str, num_splits: int | None) -> int:
    if num_splits is None:
        return 0
    if isinstance(num_splits, bool) or not isinstance(num_splits, int | np.integer):
        raise TypeError(f"{op}: num_splits: expected an int, got {type(num_splits).__name__}")
    if not 1 <= num_splits < 2**31:
        raise ValueError(
            f"{op}: num_splits: expected None or an int in [1, 2^31), got {num_splits}"
        )
    return int(num_splits)


def backends(
    q_nope: Shaped | None = None,
    q_pe: Shaped | None = None,
    kv_pages: Shaped | tuple[Shaped, Shaped] | None = None,
    page_table: Shaped | None = None,
    *,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    platform: str | None = None,
) -> list[_backends.BackendStatus]:
    """Say which backend would run a decode call, and why each other declines.

    Args:
      q_nope: an array or `jax.ShapeDtypeStruct`, as for `decode`; None asks only what is built and
        present.
      q_pe: like q_nope.
      kv_pages: a pool or a pair of pools.
      page_table: page table.
      num_splits: as for `decode`.
      batch_invariant: as for `decode`.
      platform: of JAX, such as "cpu" or "cuda"; None is its default.

    Returns:
      One status a backend, in the order in which they are tried; printing one gives a line.

    Raises:
      TypeError: a wrong dtype, or something that is no array.
      ValueError: shapes that do not fit each other, some of the arrays only, or a platform that
        JAX does not have.
    """
    op = "jax_mla.backends"
    _backends.check_platform(op, platform)
    if q_nope is None and q_pe is None and kv_pages is None and page_table is None:
        return _backends.statuses(None, platform)
    names = ("q_nope", "q_pe", "kv_pages", "page_table")
    given = (q_nope, q_pe, kv_pages, page_table)
    missing = [name for name, x in zip(names, given, strict=True) if x is None]
    if q_nope is None or q_pe is None or kv_pages is None or page_table is None:
        raise ValueError(f"{op}: {', '.join(missing)}: expected all of {names} or none, got None")
    pools = as_pools(op, kv_pages)
    _checks.shaped(op, "q_nope", q_nope)
    _checks.shaped(op, "q_pe", q_pe)
    for pool in pools:
        _checks.shaped(op, "kv_pages", pool)
    _checks.shaped(op, "page_table", page_table)
    _check(op, q_nope, q_pe, pools, page_table, has_layer=len(pools[0].shape) == 4)
    return _backends.statuses(
        _backends.DecodeCall(
            dtype=np.dtype(q_nope.dtype).name,
            batch=q_nope.shape[0],
            q_len=q_nope.shape[1] if len(q_nope.shape) == 4 else 1,
            num_heads=q_nope.shape[-2],
            d_ckv=q_nope.shape[-1],
            d_kpe=q_pe.shape[-1],
            page_size=pools[0].shape[-2],
            max_pages_per_seq=page_table.shape[1],
            num_splits=_splits(op, num_splits),
            batch_invariant=_flag(op, "batch_invariant", batch_invariant),
        ),
        platform,
    )

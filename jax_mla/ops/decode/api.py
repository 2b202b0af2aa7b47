"""The public functions `decode` and `backends`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, TypedDict, Unpack, overload

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from jax_mla._mesh import _dispatch
from jax_mla._mesh._mesh_axes import MeshAxes
from jax_mla._runtime import _backends
from jax_mla.kv_cache import (
    KvPages,
    KvScale,
    Scale,
    Shaped,
    as_pools,
    bound_of_lengths,
    find_format,
    pool_sizes,
    stored_format,
)
from jax_mla.ops import _checks, _eager, _sink
from jax_mla.ops.decode import checks, parse, primitive

OP = primitive.NAME


def _check_table(op: str, q_nope: Shaped, page_table: Shaped) -> None:
    _checks.shape(op, "page_table", page_table, (q_nope.shape[0], None), " with q_nope's batch")


FORM = parse.Form(
    op=OP,
    query_ranks=(3, 4),
    query_dims="[batch, q_len, num_heads, d_ckv] or [batch, num_heads, d_ckv]",
    table="page_table",
    check_table=_check_table,
)


class DecodeOptions(TypedDict, total=False):
    """The optional arguments of `decode` that do not change the type of its result."""

    sink: Array | None
    layer: Array | int | None
    packs: bool
    causal: bool
    sliding_window: int | None
    soft_cap: float | None
    kv_format: str | None
    kv_scale: KvScale | None
    q_scale: Scale | None
    num_splits: int | None
    batch_invariant: bool
    max_seq_len: int | None
    page_begin: Array | int | None
    mesh: Mesh | MeshAxes | None
    backend: str | None


@overload
def decode(
    q_nope: Array, q_pe: Array | None, kv_pages: KvPages, page_table: Array, seq_lens: Array, *,
    sm_scale: float, return_lse: Literal[False] = ..., **options: Unpack[DecodeOptions],
) -> Array: ...  # fmt: skip
@overload
def decode(
    q_nope: Array, q_pe: Array | None, kv_pages: KvPages, page_table: Array, seq_lens: Array, *,
    sm_scale: float, return_lse: Literal[True], **options: Unpack[DecodeOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def decode(
    q_nope: Array, q_pe: Array | None, kv_pages: KvPages, page_table: Array, seq_lens: Array, *,
    sm_scale: float, return_lse: bool, **options: Unpack[DecodeOptions],
) -> Array | tuple[Array, Array]: ...  # fmt: skip
@_eager.lets_infs_pass
def decode(
    q_nope: Annotated[Array, "[batch, q_len, num_heads, d_ckv] or [batch, num_heads, d_ckv]"],
    q_pe: Annotated[Array | None, "[batch, q_len, num_heads, d_kpe] or [batch, num_heads, d_kpe]"],
    kv_pages: KvPages,
    page_table: Annotated[Array, "[batch, max_pages_per_seq] int32"],
    seq_lens: Annotated[Array, "[batch] int32"],
    *,
    sm_scale: float,
    sink: Annotated[Array | None, "[num_heads] float32"] = None,
    layer: Array | int | None = None,
    packs: bool = False,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    kv_format: str | None = None,
    kv_scale: KvScale | None = None,
    q_scale: Scale | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    max_seq_len: int | None = None,
    page_begin: Array | int | None = None,
    mesh: Mesh | MeshAxes | None = None,
    backend: str | None = None,
) -> Array | tuple[Array, Array]:
    """Attend from the newest tokens of each sequence to its paged latent cache.

    For query token i of sequence b, and for each head:

        score(t) = sm_scale * (q_nope . ckv[t] + q_pe . kpe[t])
        out      = sum over t of softmax(score)(t) * ckv[t]

    The sum runs over the cached tokens t < seq_lens[b]; with `causal` also
    t <= seq_lens[b] - q_len + i. The new tokens must already be in the cache: call `append` first.
    `jax_mla.reference.decode` defines this in jax.numpy.

    The op works eagerly and under jit, vmap, scan and shard_map. Sequences, heads and the pages of
    the cache may be sharded over a mesh, see docs/sharding.md. The op has no derivative.

    Args:
      q_nope: [batch, q_len, num_heads, d_ckv], or [batch, num_heads, d_ckv] for q_len 1; bfloat16,
        float16 or, on the CPU, float32; with an FP8 cache also float8_e4m3fn, and float16 only on
        the CPU. The query without rotary part, multiplied by W_UK.
      q_pe: [batch, q_len, num_heads, d_kpe], or [batch, num_heads, d_kpe]; dtype of q_nope. The
        rotary part of the query; None if the rows have none, in one pool [num_pages, page_size,
        d_ckv].
      kv_pages: the cache, dtype of q_nope, or what kv_format says. One pool [num_pages, page_size,
        d_ckv + d_kpe], or a tuple of two pools (ckv [num_pages, page_size, d_ckv], kpe [num_pages,
        page_size, d_kpe]).
        With `layer`, and only then, each pool has a leading dimension num_layers. The last
        dimension may be larger: the rest of a row is padding, which is never used. With `packs`
        page_size is two dimensions, page_size / pack and pack. See docs/cache_layouts.md.
      page_table: [batch, max_pages_per_seq] int32. The pages of each sequence in order, as global
        page ids, or as local ones if `mesh` says so. Entries past the end of a sequence are not
        used. A global id outside [0, num_pages) is an error if this and seq_lens are numpy arrays
        and there is no page_begin; in a JAX array the tokens of its page do not count. The width
        bounds the lengths, to at most 2^30 tokens; see max_seq_len.
      seq_lens: [batch] int32. Tokens in the cache, including the q_len new ones; 0 is legal. A
        length outside [0, max_pages_per_seq * page_size], or above max_seq_len, is an error in a
        numpy array, and is clamped in a JAX array, such as any argument of a jitted function.
        `jax_mla.check_values` checks those too.
      sm_scale: factor on the scores, a Python number with abs(sm_scale) * log2(e) finite in
        float32.
      sink: [num_heads] float32. One more score per head, without a value: out is multiplied by
        exp(lse) / (exp(lse) + exp(sink)). Minus infinity means no sink.
      layer: which layer of a stacked pool, an int or an int32 scalar. An int outside
        [0, num_layers) is an error. A JAX scalar outside it selects no layer: then out is 0 and lse
        is -inf.
      packs: whether the pages of the pool are cut into packs of rows. Without packs, a pool of one
        layer has three dimensions, and a stacked one four.
      causal: whether query token i sees only the tokens up to its own position, which is
        seq_lens[b] - q_len + i.
      sliding_window: the most tokens that a query sees, its own and those before it: the query at
        position p of its sequence sees the tokens t with p - sliding_window < t. An int of at least
        1; None for all. FlashInfer's window_left is sliding_window - 1. Pages of which no query
        sees a token are not read, and may have any ids.
      soft_cap: a limit of the scores: soft_cap * tanh(score / soft_cap) takes the place of score.
        A Python number from 2^-60 to 2^60; None for none.
      return_lse: whether to also return the log-sum-exp of the scores.
      kv_format: name of the format in which the cache is stored: "fp8_e4m3", "fp8_ds_mla", or a
        dtype ("bf16", "f16", "f32"); None for the dtype of q_nope. See docs/cache_layouts.md. On
        CUDA the FP8 formats need queries in bfloat16 or float8_e4m3fn.
      kv_scale: the scale with which a cache in "fp8_e4m3" was written: a number or a float32
        scalar, or a tuple of two, of ckv and kpe; from 2^-60 to 2^60. The value of a code is the
        code times the scale.
      q_scale: scale of queries in float8_e4m3fn, of both parts: a number or a float32 scalar, from
        2^-60 to 2^60. How to make such queries: docs/cache_layouts.md.
      num_splits: largest number of parts into which the tokens of a sequence are split; None lets
        the backend choose. The reference ignores it.
      batch_invariant: whether the result of a sequence must not depend, bit for bit, on the other
        sequences in the batch, nor on max_seq_len or the width of page_table. The reference
        ignores it.
      max_seq_len: a static bound of the lengths, smaller than the width of page_table; None or a
        larger bound has no effect. The kernel and its split are chosen for sequences of this
        length, and scratch is sized for them: if page_table is much wider than a step's lengths, a
        bound makes the call up to a fifth faster at batch 1 to 4. Compile a program for each of a
        few bounds, see docs/quickstart.md.
      page_begin: global id of the pool's first page, an int or an int32 scalar. For context
        parallelism written by hand in a `shard_map`: tokens on pages outside the pool do not
        count, and `jax_mla.merge(..., axis_name=...)` combines the results of the devices.
      mesh: how to split the call if the argument types do not say (Auto axes). A mesh with axes
        named dp (sequences), tp (heads) and cp (pages), or a `MeshAxes`, which can also say that
        page ids are local to each group of sequences.
      backend: name of the backend; None for the first that takes the call, without by-name
        backends. `jax_mla.backends` lists the names and what each says about a call. "reference" is
        the float32 definition. "name:variant" selects one kernel of a CUDA backend, for tests.

    Returns:
      out: shape and dtype of q_nope; bfloat16 for queries in float8_e4m3fn. The result in the
        latent space, before W_UV.
      lse: only with return_lse. The shape of q_nope without d_ckv, float32, natural logarithm,
        without the sink.
      For a query token that sees no token, out is 0 and lse is -inf.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: shapes, values or shardings do not fit, or no backend takes the call; in the
        latter case the message gives the reason of each backend. Raised while tracing or lowering.
      jax.errors.JaxRuntimeError: a sharding on Auto axes cannot be served, which shows only when
        the program is compiled. On CUDA also when the call runs: the variant does not exist, or the
        page tables of one device cover more than 2^36 tokens, q_nope has more than 2^32 elements a
        sequence, or, on sm80, a layer of the pool has more than 2^31 tokens.
      NotImplementedError: the call is differentiated.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1; splits: Flash-Decoding.
    """
    operands, params, sink = parse.attention(
        FORM, q_nope, q_pe, kv_pages, page_table,
        sm_scale=sm_scale, sink=sink, layer=layer, packs=packs, causal=causal,
        sliding_window=sliding_window, soft_cap=soft_cap, kv_format=kv_format,
        kv_scale=kv_scale, q_scale=q_scale, num_splits=num_splits, batch_invariant=batch_invariant,
        max_seq_len=max_seq_len, page_begin=page_begin, backend=backend,
    )  # fmt: skip
    batch, sizes = operands.q_nope.shape[0], pool_sizes(operands.kv_pages[0], params.has_layer)
    lens = _checks.indices(OP, "seq_lens", seq_lens, (batch,), " with q_nope's batch")
    capacity = operands.page_table.shape[1] * sizes.page_size
    _checks.lengths(OP, seq_lens, capacity, params.max_seq_len)
    if page_begin is None and not _dispatch.num_local_groups(OP, mesh):
        q_len = 1 if operands.q_nope.ndim == 3 else operands.q_nope.shape[1]
        seen = params.sliding_window + q_len - 1 if params.sliding_window else None
        _checks.page_ids(OP, page_table, seq_lens, sizes, seen)
    with_lse = _checks.flag(OP, "return_lse", return_lse)
    out, lse = _decode(operands._replace(seq_lens=lens), sink, params=params, mesh=mesh)
    return (out, lse) if with_lse else out


@_eager.compiled(OP)
def _decode(
    operands: primitive.Operands,
    sink: Array | None,
    *,
    params: primitive.Params,
    mesh: Mesh | MeshAxes | None = None,
) -> tuple[Array, Array]:
    """Run the op on arguments that have been checked."""
    is_part_of_cache = operands.page_begin is not None
    operands = checks.as_arrays(operands)
    is_rank_3 = operands.q_nope.ndim == 3
    if is_rank_3:
        operands = operands._replace(**_eager.expanded(operands, ("q_nope", "q_pe"), (1,)))
    if is_part_of_cache:
        operands = primitive.keep_owned_pages(operands, params)
    out, lse = primitive.bind(operands, params, mesh=mesh)
    if is_rank_3:
        out, lse = lax.squeeze(out, (1,)), lax.squeeze(lse, (1,))
    return _sink.apply(out, lse, sink), lse


def backends(
    q_nope: Shaped | None = None,
    q_pe: Shaped | None = None,
    kv_pages: Shaped | tuple[Shaped, Shaped] | None = None,
    page_table: Shaped | None = None,
    *,
    layer: Array | int | None = None,
    packs: bool = False,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    max_seq_len: int | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    kv_format: str | None = None,
    platform: str | None = None,
) -> list[_backends.BackendStatus]:
    """Say which backend would run a decode call, and why each of the others would not.

    Without arrays the answer covers this build and this machine. With arrays it covers a call with
    these shapes and dtypes; nothing is computed.

    Args:
      q_nope: an array or a `jax.ShapeDtypeStruct`, as for `decode`; so are the next three.
      q_pe: rotary part of the query; None, with the others, for rows without one.
      kv_pages: a pool, or a tuple of two pools.
      page_table: page table.
      layer: as for `decode`; only whether it is given matters.
      packs: as for `decode`.
      num_splits: as for `decode`.
      batch_invariant: as for `decode`.
      max_seq_len: as for `decode`.
      sliding_window: as for `decode`.
      soft_cap: as for `decode`.
      kv_format: as for `decode`.
      platform: JAX platform, for example "cpu" or "cuda"; None for JAX's default.

    Returns:
      One status per backend, in the order in which they are tried. `print` shows each as a line.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: the shapes do not fit each other, only some of the arrays are given, or JAX has
        no such platform.
    """
    op = "jax_mla.backends"
    _backends.check_platform(op, platform)
    if q_nope is None and q_pe is None and kv_pages is None and page_table is None:
        return _backends.statuses(None, platform)
    names = ("q_nope", "kv_pages", "page_table")
    given = (q_nope, kv_pages, page_table)
    missing = [name for name, x in zip(names, given, strict=True) if x is None]
    if q_nope is None or kv_pages is None or page_table is None:
        raise ValueError(f"{op}: {', '.join(missing)}: expected all of {names} or none, got None")
    pools = as_pools(op, kv_pages)
    _checks.shaped(op, "q_nope", q_nope)
    if q_pe is not None:
        _checks.shaped(op, "q_pe", q_pe)
    for pool in pools:
        _checks.shaped(op, "kv_pages", pool)
    _checks.shaped(op, "page_table", page_table)
    has_layer, fmt = layer is not None, find_format(op, kv_format)
    form = dataclasses.replace(FORM, op=op)
    capacity = parse.check(
        form, q_nope, q_pe, pools, page_table, has_layer=has_layer, packs=packs, fmt=fmt
    )
    bound = checks.max_seq_len(op, max_seq_len, capacity)
    params = primitive.Params(
        sm_scale=1.0,
        backend="",
        has_layer=has_layer,
        num_splits=checks.splits(op, num_splits),
        batch_invariant=_checks.flag(op, "batch_invariant", batch_invariant),
        max_seq_len=bound,
        sliding_window=checks.sliding_window(op, sliding_window, bound_of_lengths(capacity, bound)),
        soft_cap=checks.soft_cap(op, soft_cap),
        kv_format=stored_format(fmt, pools),
    )
    shape = q_nope.shape if len(q_nope.shape) == 4 else (q_nope.shape[0], 1, *q_nope.shape[1:])
    query = jax.ShapeDtypeStruct(shape, checks.dtype_of_call(q_nope))
    one = jax.ShapeDtypeStruct((1,), np.dtype(np.int32))
    lens = jax.ShapeDtypeStruct(page_table.shape[:1], np.dtype(np.int32))
    types = primitive.Operands(query, q_pe, page_table, lens, one, one, kv_pages=pools)
    call = primitive.decode_call(*primitive.types_in_window(types, params))
    return _backends.statuses(call, platform)

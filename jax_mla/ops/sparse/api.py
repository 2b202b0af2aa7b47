"""The public function `sparse_attention`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jax_mla._mesh._mesh_axes import MeshAxes
from jax_mla.kv_cache import KvPages, KvScale, Scale, Shaped, pool_sizes
from jax_mla.ops import _checks, _eager, _sink
from jax_mla.ops.decode import checks, parse
from jax_mla.ops.decode.primitive import Operands, Params
from jax_mla.ops.sparse import primitive

OP = primitive.NAME


def _check_table(op: str, q_nope: Shaped, indices: Shaped) -> None:
    expected = (*q_nope.shape[:-2], None)
    _checks.shape(op, "indices", indices, expected, ", a list for each query of q_nope")


FORM = parse.Form(
    op=OP,
    query_ranks=(3, 4),
    query_dims="[tokens, num_heads, d_ckv] or [batch, q_len, num_heads, d_ckv]",
    table="indices",
    check_table=_check_table,
    entry_tokens=1,
)


class SparseOptions(TypedDict, total=False):
    """The optional arguments of `sparse_attention` that do not change the type of its result."""

    topk_lens: Array | None
    sink: Array | None
    layer: Array | int | None
    packs: bool
    kv_format: str | None
    kv_scale: KvScale | None
    q_scale: Scale | None
    batch_invariant: bool
    page_begin: Array | int | None
    mesh: Mesh | MeshAxes | None
    backend: str | None


@overload
def sparse_attention(
    q_nope: Array, q_pe: Array | None, kv_pages: KvPages, indices: Array, *,
    sm_scale: float, return_lse: Literal[False] = ..., **options: Unpack[SparseOptions],
) -> Array: ...  # fmt: skip
@overload
def sparse_attention(
    q_nope: Array, q_pe: Array | None, kv_pages: KvPages, indices: Array, *,
    sm_scale: float, return_lse: Literal[True], **options: Unpack[SparseOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def sparse_attention(
    q_nope: Array, q_pe: Array | None, kv_pages: KvPages, indices: Array, *,
    sm_scale: float, return_lse: bool, **options: Unpack[SparseOptions],
) -> Array | tuple[Array, Array]: ...  # fmt: skip
@_eager.lets_infs_pass
def sparse_attention(
    q_nope: Annotated[Array, "[tokens, num_heads, d_ckv] or [batch, q_len, num_heads, d_ckv]"],
    q_pe: Annotated[Array | None, "[tokens, num_heads, d_kpe] or [batch, q_len, num_heads, d_kpe]"],
    kv_pages: KvPages,
    indices: Annotated[Array, "[tokens, k] or [batch, q_len, k] int32"],
    *,
    sm_scale: float,
    topk_lens: Annotated[Array | None, "[tokens] or [batch, q_len] int32"] = None,
    sink: Annotated[Array | None, "[num_heads] float32"] = None,
    layer: Array | int | None = None,
    packs: bool = False,
    return_lse: bool = False,
    kv_format: str | None = None,
    kv_scale: KvScale | None = None,
    q_scale: Scale | None = None,
    batch_invariant: bool = False,
    page_begin: Array | int | None = None,
    mesh: Mesh | MeshAxes | None = None,
    backend: str | None = None,
) -> Array | tuple[Array, Array]:
    """Attend from each query to its own list of cached tokens, as DeepSeek V3.2 and GLM-5 do.

    For query i, and for each head:

        score(j) = sm_scale * (q_nope . ckv[indices[i, j]] + q_pe . kpe[indices[i, j]])
        out      = sum over j of softmax(score)(j) * ckv[indices[i, j]]

    The sum runs over the entries j < topk_lens[i] that name a row of the pool. There is no other
    mask: whoever chooses the entries is responsible for causality. The order of a list only affects
    rounding. A repeated entry counts each time. `jax_mla.reference.sparse_attention` defines this
    in jax.numpy.

    Queries that decode and queries of prompts may be mixed: each has its own list. The op works
    eagerly and under jit, vmap, scan and shard_map. It is sharded like `decode`, with queries as
    sequences (docs/sharding.md). The cache never moves. The op has no derivative.

    Args:
      q_nope: [tokens, num_heads, d_ckv] or [batch, q_len, num_heads, d_ckv]; dtypes as for
        `decode`. The query without rotary part, multiplied by W_UK.
      q_pe: [tokens, num_heads, d_kpe] or [batch, q_len, num_heads, d_kpe]; dtype of q_nope. The
        rotary part; None if the rows have none.
      kv_pages: the cache, as for `decode`, with fewer than 2^31 tokens in a layer.
      indices: [tokens, k] or [batch, q_len, k] int32. The list of each query, as slots: page id
        times page_size plus the row in the page. Slots are the same in every layer of a stacked
        pool. A slot outside the pool, such as -1, has no key and is never read.
      sm_scale: factor on the scores, as for `decode`.
      topk_lens: [tokens] or [batch, q_len] int32. How many entries of each list count; the others
        may be anything. None: all. A length outside [0, k] is an error in a numpy array, and is
        clamped in a JAX array.
      sink: [num_heads] float32. One more score per head, without a value: out is multiplied by
        exp(lse) / (exp(lse) + exp(sink)). Minus infinity means no sink.
      layer: which layer of a stacked pool, as for `decode`.
      packs: whether the pages of the pool are cut into packs, as for `decode`.
      return_lse: whether to also return the log-sum-exp of the scores.
      kv_format: name of the format in which the cache is stored, as for `decode`.
      kv_scale: scale of a cache in "fp8_e4m3", as for `decode`.
      q_scale: scale of queries in float8_e4m3fn, as for `decode`.
      batch_invariant: whether the result of a query must not depend, bit for bit, on the others.
        The reference ignores it.
      page_begin: global id of the pool's first page, as for `decode`: slots on pages outside the
        pool are ignored.
      mesh: how to split the call if the argument types do not say, as for `decode`.
      backend: name of the backend, as for `decode`.

    Returns:
      out: shape and dtype of q_nope; bfloat16 for queries in float8_e4m3fn. The result in the
        latent space, before W_UV.
      lse: only with return_lse. The shape of q_nope without d_ckv, float32, natural logarithm,
        without the sink.
      For a query without a key, out is 0 and lse is -inf.

    Raises:
      TypeError, ValueError, jax.errors.JaxRuntimeError, NotImplementedError: as for `decode`.

    Source: DeepSeek-V3.2 (DeepSeek sparse attention); sinks: FlashMLA.
    """
    operands, params, sink = parse.attention(
        FORM, q_nope, q_pe, kv_pages, indices,
        sm_scale=sm_scale, sink=sink, layer=layer, packs=packs, causal=False, kv_format=kv_format,
        kv_scale=kv_scale, q_scale=q_scale, batch_invariant=batch_invariant,
        page_begin=page_begin, backend=backend,
    )  # fmt: skip
    _checks.slots(OP, "kv_pages", pool_sizes(operands.kv_pages[0], params.has_layer))
    *rows, k = operands.page_table.shape
    if topk_lens is None:
        lens = jnp.full(rows, k, jnp.int32)
    else:
        why = ", a number for each query of q_nope"
        lens = _checks.indices(OP, "topk_lens", topk_lens, rows, why)
        _checks.values(OP, "topk_lens", topk_lens, 0, k + 1, f"lengths of at most {k}")
    with_lse = _checks.flag(OP, "return_lse", return_lse)
    if len(rows) == 2:
        params = dataclasses.replace(params, has_queries=True)
    out, lse = _attend(operands._replace(seq_lens=lens), sink, params=params, mesh=mesh)
    return (out, lse) if with_lse else out


@_eager.compiled(OP)
def _attend(
    operands: Operands,
    sink: Array | None,
    *,
    params: Params,
    mesh: Mesh | MeshAxes | None = None,
) -> tuple[Array, Array]:
    """Run the op on arguments that have been checked."""
    is_part_of_cache = operands.page_begin is not None
    operands = checks.as_arrays(operands)
    operands = operands._replace(**_eager.expanded(operands, ("q_nope", "q_pe"), (-3,)))
    if params.has_queries:  # one more batch dimension
        scalars = operands.layer, operands.page_begin, operands.kv_scale, operands.q_scale
        layer, page_begin, kv_scale, q_scale = jax.tree.map(lambda x: x[None], scalars)
        operands = operands._replace(
            layer=layer, page_begin=page_begin, kv_scale=kv_scale, q_scale=q_scale
        )
    if is_part_of_cache:
        operands = primitive.keep_owned_slots(_without_wild_begin(operands, params), params)
    out, lse = primitive.bind(operands, params, mesh=mesh)
    out, lse = lax.squeeze(out, (out.ndim - 3,)), lax.squeeze(lse, (lse.ndim - 2,))
    return _sink.apply(out, lse, sink), lse


def _without_wild_begin(operands: Operands, params: Params) -> Operands:
    """Empty all lists if page_begin is no page that a slot can name; slots are int32."""
    page_size = pool_sizes(operands.kv_pages[0], params.has_layer).page_size
    begin = operands.page_begin
    is_page = (begin >= 0) & (begin <= (_checks.MAX_SLOTS - 1) // page_size)  # one number
    return operands._replace(
        page_begin=jnp.where(is_page, begin, 0),
        page_table=jnp.where(is_page.reshape(()), operands.page_table, -1),
    )

"""The definition of sparse attention in float32 jax.numpy."""

from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
from jax import Array

from jax_mla import _quantization
from jax_mla.kv_cache import KvPages, KvScale, Scale, as_pools, pool_sizes, tokens_as_pages, width
from jax_mla.ops import _checks, _eager, _sink
from jax_mla.ops.decode import reference as decode

OP = "jax_mla.reference.sparse_attention"


@_eager.lets_infs_pass
@_eager.definition
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
    page_begin: Array | int = 0,
) -> Array | tuple[Array, Array]:
    """Attend from each query to its own list of cached tokens, by definition.

    For query i, and for each head:

        score(j) = sm_scale * (q_nope . ckv[indices[i, j]] + q_pe . kpe[indices[i, j]])
        out      = sum over j of softmax(score)(j) * ckv[indices[i, j]]

    The sum runs over the entries j < topk_lens[i] that name a row of the pool. A repeated entry
    counts each time. Everything is computed in float32 at the highest precision.

    Args:
      q_nope: [tokens, num_heads, d_ckv] or [batch, q_len, num_heads, d_ckv], any float dtype. The
        query without rotary part, multiplied by W_UK.
      q_pe: [tokens, num_heads, d_kpe] or [batch, q_len, num_heads, d_kpe]. The rotary part;
        None if the rows have none.
      kv_pages: one pool or a tuple of two, as for `jax_mla.decode`.
      indices: [tokens, k] or [batch, q_len, k] int32, slots: page * page_size + row in the page.
      sm_scale: factor on the scores.
      topk_lens: [tokens] or [batch, q_len] int32. How many entries of a list count, clamped to
        [0, k]; None for all.
      sink: [num_heads] float32. out is multiplied by exp(lse) / (exp(lse) + exp(sink)).
      layer: which layer of a stacked pool; one outside the pool has no rows.
      packs: whether the pages of the pool are cut into packs.
      return_lse: whether to also return the log-sum-exp of the scores, without the sink.
      kv_format: name of the format in which the cache is stored; see `reference.decode_rows`.
      kv_scale: scale of the cache, or a tuple of those of ckv and kpe.
      q_scale: factor on the queries; None for 1.
      page_begin: global id of the pool's first page.

    Returns:
      out: shape of q_nope, float32.
      lse: only with return_lse. The shape of q_nope without d_ckv, float32, natural logarithm.
      For a query without a key, out is 0 and lse is -inf.

    Source: DeepSeek-V3.2, section 2.1 (DeepSeek sparse attention).
    """
    k = indices.shape[-1]
    lists = jnp.asarray(indices, jnp.int32).reshape(-1, k)
    lens = jnp.asarray(k if topk_lens is None else topk_lens, jnp.int32).reshape(-1)
    pools = [jnp.asarray(pool) for pool in as_pools(OP, kv_pages)]
    for pool in pools:
        _checks.rank_of_pool(OP, "kv_pages", pool, has_layer=layer is not None, packs=packs)
    page_size = pool_sizes(pools[0], layer is not None).page_size
    begin = page_begin * page_size
    gathered = [
        decode.gather_rows(tokens_as_pages(pool, layer is not None), lists, layer, begin)
        for pool in pools
    ]
    parts, owned = [rows for rows, _ in gathered], gathered[0][1]
    rows = jnp.concatenate(
        _quantization.decode_rows(parts, q_nope.shape[-1], width(q_pe), kv_format, kv_scale),
        axis=-1,
    )
    is_key = (lists >= 0) & owned & (jnp.arange(k, dtype=jnp.int32)[None] < lens[:, None])
    out, lse = decode.attend(
        q_nope.reshape(len(lists), 1, *q_nope.shape[-2:]),
        None if q_pe is None else q_pe.reshape(len(lists), 1, *q_pe.shape[-2:]),
        rows,
        is_key[:, None],
        sm_scale=sm_scale,
        q_scale=q_scale,
    )
    out, lse = out.reshape(q_nope.shape), lse.reshape(q_nope.shape[:-1])
    out = _sink.apply(out, lse, sink)
    return (out, lse) if return_lse else out

"""The definition of decode in float32 jax.numpy, which specifies what every backend does."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from jax_mla import _quantization
from jax_mla.kv_cache import (
    KvPages,
    KvScale,
    Scale,
    as_pools,
    bound_of_lengths,
    local_pages,
    pool_sizes,
    width,
)
from jax_mla.ops import _checks, _eager, _sink


def gather_rows(
    pool: Array, page_table: Array, layer: Array | int | None, page_begin: Array | int
) -> tuple[Array, Array]:
    """Read the rows of each sequence from its pages, in token order.

    Args:
      pool: [num_pages, page_size, width] or [num_pages, page_size / pack, pack, width], both with
        num_layers in front if there is a layer.
      page_table: [batch, max_pages_per_seq] int32, global page ids.
      layer: which layer of a stacked pool; a layer outside the pool has no pages. None for a pool
        that is not stacked.
      page_begin: global id of the pool's first page.

    Returns:
      rows: [batch, max_pages_per_seq * page_size, width]; arbitrary where `owned` is false.
      owned: [batch, max_pages_per_seq * page_size] bool, whether the pool holds the row's page.
    """
    num_layers, num_pages, page_size = pool_sizes(pool, layer is not None)
    if isinstance(num_pages, int) and num_pages == 0:  # JAX gathers nothing from no page
        shape = page_table.shape[0], page_table.shape[1] * page_size
        return jnp.zeros((*shape, pool.shape[-1]), pool.dtype), jnp.zeros(shape, bool)
    if layer is None:
        layer, pool = 0, pool[None]
    local, owned = local_pages(page_table, page_begin, num_pages)
    owned &= (layer >= 0) & (layer < num_layers)
    page = jnp.where(owned, local, 0)
    # [batch, max_pages, *rows, width]
    rows = _quantization.as_bytes(pool)[jnp.clip(layer, 0, num_layers - 1), page]
    rows = _quantization.from_bytes(rows, pool.dtype)
    batch, max_pages = page_table.shape
    return (
        rows.reshape(batch, max_pages * page_size, pool.shape[-1]),
        jnp.repeat(owned, page_size, axis=1),
    )


def columns(scales: Array | None) -> tuple[Array, Array] | None:
    """Return both columns of [1 or batch, 2]; None for None."""
    return None if scales is None else (scales[:, 0], scales[:, 1])


def _each(scale: Scale, rank: int) -> Array:
    """Return one number, or one for each sequence, for arrays [batch, ...] of this rank."""
    return jnp.asarray(scale, jnp.float32).reshape(-1, *(1,) * (rank - 1))


@_eager.lets_infs_pass
@_eager.definition
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
    max_seq_len: int | None = None,
    page_begin: Array | int = 0,
    kv_format: str | None = None,
    kv_scale: KvScale | None = None,
    q_scale: Scale | None = None,
) -> Array | tuple[Array, Array]:
    """Attend to a paged latent cache, by definition.

    For query token i of sequence b, and for each head:

        score(t) = sm_scale * (q_nope . ckv[t] + q_pe . kpe[t])
        out      = sum over t of softmax(score)(t) * ckv[t]

    The sum runs over the cached tokens t < seq_lens[b] whose page the pool holds; with `causal`
    also t <= seq_lens[b] - q_len + i. Everything is computed in float32 at the highest precision.

    Args:
      q_nope: [batch, q_len, num_heads, d_ckv], or [batch, num_heads, d_ckv] for q_len 1; any float
        dtype. The query without rotary part, multiplied by W_UK.
      q_pe: [batch, q_len, num_heads, d_kpe], or [batch, num_heads, d_kpe]. The rotary part;
        None if the rows have none.
      kv_pages: one pool or a tuple of two, as for `jax_mla.decode`.
      page_table: [batch, max_pages_per_seq] int32, global page ids. Entries past the end of a
        sequence are not used.
      seq_lens: [batch] int32. Tokens in the cache, including the q_len new ones; clamped to
        [0, max_pages_per_seq * page_size], and to max_seq_len.
      sm_scale: factor on the scores.
      sink: [num_heads] float32. out is multiplied by exp(lse) / (exp(lse) + exp(sink)).
      layer: which layer of a stacked pool.
      packs: whether the pages of the pool are cut into packs.
      causal: whether query token i sees only the tokens up to its own position.
      sliding_window: the most tokens that a query sees, its own and those before it: the query at
        position p sees the tokens t with p - sliding_window < t. None for all.
      soft_cap: soft_cap * tanh(score / soft_cap) takes the place of score. None for no limit.
      return_lse: whether to also return the log-sum-exp of the scores.
      max_seq_len: bound of the lengths; None for the width of page_table.
      page_begin: global id of the pool's first page.
      kv_format: name of the format in which the cache is stored; see `reference.decode_rows`.
      kv_scale: scale of the cache, or a tuple of those of ckv and kpe; each one number, or [batch].
      q_scale: factor on the queries, one number or [batch]; None for 1.

    Returns:
      out: shape of q_nope, float32.
      lse: only with return_lse. The shape of q_nope without d_ckv, float32, natural logarithm,
        without the sink.
      For a query token that sees no token, out is 0 and lse is -inf.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 (weights absorbed).
    """
    if q_nope.ndim == 3:
        result = decode(
            q_nope[:, None], None if q_pe is None else q_pe[:, None], kv_pages, page_table,
            seq_lens, sm_scale=sm_scale, sink=sink, layer=layer, packs=packs, causal=causal,
            sliding_window=sliding_window, soft_cap=soft_cap, return_lse=True,
            max_seq_len=max_seq_len, page_begin=page_begin, kv_format=kv_format,
            kv_scale=kv_scale, q_scale=q_scale,
        )  # fmt: skip
        out, lse = result[0][:, 0], result[1][:, 0]
        return (out, lse) if return_lse else out
    q_len, d_ckv = q_nope.shape[1], q_nope.shape[3]
    pools = [jnp.asarray(pool) for pool in as_pools("jax_mla.reference.decode", kv_pages)]
    for pool in pools:
        _checks.rank_of_pool(
            "jax_mla.reference.decode", "kv_pages", pool, has_layer=layer is not None, packs=packs
        )
    page_size = pool_sizes(pools[0], layer is not None).page_size
    bound = bound_of_lengths(page_table.shape[1] * page_size, max_seq_len or 0)
    if max_seq_len is not None:  # so that the rest of the table costs nothing here either
        page_table = page_table[:, : -(-bound // page_size)]
    gathered = [gather_rows(pool, page_table, layer, page_begin) for pool in pools]
    owned = gathered[0][1]
    if kv_scale is not None:
        ckv_scale, kpe_scale = _quantization.scale_pair(kv_scale)
        kv_scale = _each(ckv_scale, 3), _each(kpe_scale, 3)
    parts = _quantization.decode_rows(
        [rows for rows, _ in gathered], d_ckv, width(q_pe), kv_format, kv_scale
    )
    rows = jnp.concatenate(parts, axis=-1)

    num_tokens = rows.shape[1]
    t = jnp.arange(num_tokens, dtype=jnp.int32)[None]  # [1, tokens]
    lens = jnp.clip(seq_lens, 0, bound).astype(jnp.int32)[:, None]  # [batch, 1]
    places = lens - q_len + jnp.arange(q_len, dtype=jnp.int32)[None]  # [batch, q_len]
    mask = ((t < lens) & owned)[:, None]  # [batch, q_len or 1, tokens]
    if causal:
        mask &= t[None] <= places[..., None]
    if sliding_window is not None:
        # Not `places - sliding_window`, which may be too small for 32 bits.
        mask &= places[..., None] - t[None] < sliding_window

    out, lse = attend(
        q_nope, q_pe, rows, mask, sm_scale=sm_scale, q_scale=q_scale, soft_cap=soft_cap
    )
    out = _sink.apply(out, lse, sink)
    return (out, lse) if return_lse else out


def attend(
    q_nope: Array,
    q_pe: Array | None,
    rows: Array,
    mask: Array,
    *,
    sm_scale: float,
    q_scale: Scale | None = None,
    soft_cap: float | None = None,
) -> tuple[Array, Array]:
    """Attend to rows in float32 at the highest precision.

    Args:
      q_nope: [batch, q_len, num_heads, d_ckv].
      q_pe: [batch, q_len, num_heads, d_kpe], or None.
      rows: [batch, tokens, d_ckv + d_kpe] float32; anything where no query sees the token.
      mask: [batch, q_len or 1, tokens] bool, whether a query sees a token.
      sm_scale: factor on the scores.
      q_scale: factor on the queries, one number or [batch]; None for 1.
      soft_cap: limit of the scores, or None.

    Returns:
      out [batch, q_len, num_heads, d_ckv] and lse [batch, q_len, num_heads], float32.
    """
    f32 = jnp.float32
    d_ckv = q_nope.shape[3]
    # Rows that must not be read become 0, because a weight of 0 times NaN would be NaN.
    rows = jnp.where(jnp.any(mask, axis=1)[..., None], rows, 0)
    q = jnp.concatenate([q.astype(f32) for q in (q_nope, q_pe) if q is not None], axis=-1)
    if q_scale is not None:
        q = q * _each(q_scale, 4)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("bqhd,btd->bqht", q, rows, precision=highest)
    scores = jnp.asarray(sm_scale, f32) * scores
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask[:, :, None], scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    safe_peak = jnp.where(peak == -jnp.inf, 0, peak)
    weights = jnp.exp(scores - safe_peak)
    total = jnp.sum(weights, axis=-1)
    empty = total == 0  # no visible token, or all scores are -inf
    safe_total = jnp.where(empty, 1, total)
    out = jnp.einsum("bqht,btd->bqhd", weights, rows[..., :d_ckv], precision=highest)
    out = out / safe_total[..., None]
    lse = jnp.where(empty, -jnp.inf, safe_peak[..., 0] + jnp.log(safe_total))
    return out, lse

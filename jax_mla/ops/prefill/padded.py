"""`prefill` on prompts that are padded to one length, by cuDNN or in jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_mla._mesh import _dispatch
from jax_mla.kv_cache import pool_sizes
from jax_mla.ops.merge.api import merge
from jax_mla.ops.prefill import prefix
from jax_mla.ops.prefill.attention import attend, attend_masked
from jax_mla.ops.prefill.operands import (
    Cache,
    Params,
    Tokens,
    Weights,
    at_most,
    find_prompts,
)


def prefill(
    tokens: Tokens,
    weights: Weights,
    cache: Cache | None,
    cu_q_lens: Array,
    num_seqs: Array | None,
    *,
    params: Params,
) -> tuple[Array, Array]:
    """Run `prefill` on arguments that have been checked.

    Returns:
      out: [tokens, heads, d_v], dtype of q_nope.
      lse: [tokens, heads] float32.
    """
    num_tokens, q_len = tokens.ckv.shape[0], params.max_q_len
    prompts = find_prompts(num_tokens, cu_q_lens, num_seqs, cache, params)
    q_lens = prompts.end - prompts.begin

    place = jnp.arange(q_len, dtype=jnp.int32)[None]
    source = jnp.clip(prompts.begin[:, None] + place, 0, num_tokens - 1)
    padded = jax.tree.map(lambda x: _zero_from(x[source], q_lens), tokens)
    q = padded.q_nope
    if padded.q_pe is not None:
        q = jnp.concatenate([q, padded.q_pe], axis=-1)
    k, v = _keys_and_values(padded.ckv, padded.kpe, weights)
    if params.has_masks:
        mask = (place[:, None] <= place[:, :, None]) & (place < q_lens[:, None])[:, None]
        out, lse = _attend_in_window(q, k, v, mask, place, place, params)
    else:
        out, lse = attend(
            q, k, v, q_lens, q_lens,
            sm_scale=params.sm_scale, causal=True, implementation=params.implementation,
        )  # fmt: skip
    if cache is not None:
        part = _attend_to_prefix(q, q_lens, prompts.prefix_lens, weights, cache, params)
        out, lse = _merge((out, lse), part)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    seq = jnp.sum(token[:, None] >= prompts.end[None], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, q_lens.shape[0] - 1)
    index = token - prompts.begin[seq]
    used = (index >= 0) & (index < q_lens[seq])
    index = jnp.clip(index, 0, q_len - 1)
    out = jnp.where(used[:, None, None], out[seq, index].astype(tokens.q_nope.dtype), 0)
    return out, jnp.where(used[:, None], lse[seq, index], -jnp.inf)


def _attend_to_prefix(
    q: Array, q_lens: Array, prefix_lens: Array, weights: Weights, cache: Cache, params: Params
) -> tuple[Array, Array]:
    """Attend to the cached tokens before the new ones, a chunk of bounded memory at a time."""
    page_size = pool_sizes(cache.kv_pages[0], params.has_layer).page_size
    if params.sliding_window:
        page_table, lens = prefix.pages_in_window(cache, prefix_lens, params)
    else:
        page_table, lens = prefix.owned_pages(cache, prefix_lens, params)
    seqs, max_pages = page_table.shape
    # With a symbolic number of sequences or page size, a page each.
    tokens = seqs * page_size
    pages = max(params.prefix_chunk // tokens, 1) if isinstance(tokens, int) else 1
    pages = at_most(pages, max_pages)
    chunk = pages * page_size
    d_kpe = q.shape[-1] - weights.w_uk.shape[1]
    empty_out = jnp.zeros((*q.shape[:-1], weights.w_uv.shape[-1]), jnp.float32)
    empty_lse = jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)
    # A loop's state varies over the same manual axes as what is added to it.
    empty_out, empty_lse, *_ = _dispatch.align_manual_axes(
        [empty_out, empty_lse, q, q_lens, *jax.tree.leaves((weights, cache, prefix_lens))]
    )

    def add_chunk(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        columns = i * pages + jnp.arange(pages, dtype=jnp.int32)
        ids = jnp.take(page_table, columns, axis=1, mode="fill", fill_value=-1)
        kv_lens = jnp.clip(lens - i * chunk, 0, chunk)
        rows = prefix.read_rows(cache, ids, params)
        key = i * chunk + jnp.arange(chunk, dtype=jnp.int32)[None]
        used = key < lens[:, None]
        if params.sliding_window:  # what the first query sees
            used &= prefix.is_owned(cache, ids, params)
            used &= lens[:, None] - key < params.sliding_window
        rows = [jnp.where(used[..., None], x, 0) for x in rows]
        ckv, kpe = prefix.ckv_and_kpe(rows, weights, d_kpe, cache, params)
        k, v = _keys_and_values(ckv, kpe, weights)
        if params.has_masks:
            query = lens[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
            part = _attend_in_window(q, k, v, used[:, None], query, key, params)
        else:
            part = attend(
                q, k, v, q_lens, kv_lens,
                sm_scale=params.sm_scale, causal=False, implementation=params.implementation,
            )  # fmt: skip
        return _merge(state, part)

    num_chunks = (jnp.max(lens) + chunk - 1) // chunk
    out, lse = lax.fori_loop(0, num_chunks, add_chunk, (empty_out, empty_lse))
    return (out, lse) if params.axis_name is None else merge(out, lse, axis_name=params.axis_name)


def _attend_in_window(
    q: Array, k: Array, v: Array, mask: Array, query: Array, key: Array, params: Params
) -> tuple[Array, Array]:
    """Attend with a sliding window, a soft cap, or both.

    Args:
      q: [seqs, q_len, heads, d_qk].
      k: [seqs, kv_len, heads, d_qk].
      v: [seqs, kv_len, heads, d_v].
      mask: [seqs or 1, q_len or 1, kv_len] bool, what a query sees without the window.
      query: [seqs or 1, q_len] int32, positions of the queries.
      key: [seqs or 1, kv_len] int32, positions of the keys.
      params: the static parameters.
    """
    if params.sliding_window:
        mask = mask & (query[..., None] - key[:, None] < params.sliding_window)
    mask = jnp.broadcast_to(mask, (q.shape[0], q.shape[1], k.shape[1]))
    return attend_masked(q, k, v, mask, sm_scale=params.sm_scale, soft_cap=params.soft_cap)


def _keys_and_values(ckv: Array, kpe: Array | None, weights: Weights) -> tuple[Array, Array]:
    """Make the keys and values of every head of rows [seqs, len, d_ckv] and [seqs, len, d_kpe]."""
    k_nope, v = prefix.up_project(ckv, weights)
    if kpe is None:
        return k_nope, v
    k_pe = jnp.broadcast_to(kpe[:, :, None], (*k_nope.shape[:-1], kpe.shape[-1]))
    return jnp.concatenate([k_nope, k_pe], axis=-1), v


def _zero_from(x: Array, lens: Array) -> Array:
    """Zero x [seqs, len, ...] from each sequence's length on, because 0 times NaN is NaN."""
    place = jnp.arange(x.shape[1], dtype=jnp.int32)
    used = place[None] < lens[:, None]
    return jnp.where(used.reshape(*used.shape, *[1] * (x.ndim - 2)), x, 0)


def _merge(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    return merge(jnp.stack([a[0], b[0]]), jnp.stack([a[1], b[1]]))

"""`prefill` on prompts end to end, without padding, by a kernel that takes them in this form.

Nothing is padded, and neither queries nor keys are concatenated with their rotary parts. Keys and
values of the cached tokens are made a chunk at a time. Every chunk adds to the result of those
before it, and the new tokens are the last to be added.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_mla._mesh import _dispatch
from jax_mla.kv_cache import pool_sizes, width
from jax_mla.ops.merge.api import merge
from jax_mla.ops.prefill import operands as ops
from jax_mla.ops.prefill import prefix, primitive

_State = tuple[Array, Array]  # out [tokens, heads, d_v] float32, lse [tokens, heads]


def prefill(
    tokens: ops.Tokens,
    weights: ops.Weights,
    cache: ops.Cache | None,
    cu_q_lens: Array,
    num_seqs: Array | None,
    *,
    params: ops.Params,
) -> tuple[Array, Array]:
    """Run `prefill` on arguments that have been checked.

    Returns:
      out: [tokens, heads, d_v], dtype of q_nope.
      lse: [tokens, heads] float32.
    """
    prompts = ops.find_prompts(tokens.ckv.shape[0], cu_q_lens, num_seqs, cache, params)
    prior = () if cache is None else _attend_to_prefix(tokens, weights, cache, prompts, params)
    k_nope, v = prefix.up_project(tokens.ckv, weights)
    queries = [prompts.begin, prompts.end]
    return _attend(tokens, k_nope, tokens.kpe, v, [*queries, *queries], prior, params, new=True)


def _attend_to_prefix(
    tokens: ops.Tokens,
    weights: ops.Weights,
    cache: ops.Cache,
    prompts: ops.Prompts,
    params: ops.Params,
) -> _State:
    """Attend to the cached tokens of all sequences, a whole number of pages of each."""
    page_size = pool_sizes(cache.kv_pages[0], params.has_layer).page_size
    page_table, lens = prefix.owned_pages(cache, prompts.prefix_lens, params)
    seqs, max_pages = page_table.shape
    num_pages = -(-lens // page_size)
    page_end = jnp.cumsum(num_pages, dtype=jnp.int32)  # of each sequence, among those of all
    page_begin = page_end - num_pages
    # With a symbolic page size, a page.
    pages = max(params.prefix_chunk // page_size, 1) if isinstance(page_size, int) else 1
    chunk_pages = ops.at_most(pages, page_table.size)

    def add_chunk(i: Array, prior: _State) -> _State:
        page = i * chunk_pages + jnp.arange(chunk_pages, dtype=jnp.int32)
        seq = jnp.sum(page[:, None] >= page_end[None], axis=1, dtype=jnp.int32)
        seq = jnp.minimum(seq, seqs - 1)
        column = jnp.clip(page - page_begin[seq], 0, max_pages - 1)
        ids = jnp.where(page < page_end[-1], page_table[seq, column], -1)
        rows = prefix.read_rows(cache, ids[None], params)
        ckv, kpe = prefix.ckv_and_kpe(rows, weights, width(tokens.kpe), cache, params)
        k_nope, v = prefix.up_project(ckv[0], weights)
        begin = (page_begin - i * chunk_pages) * page_size
        keys = [jnp.clip(x, 0, chunk_pages * page_size) for x in (begin, begin + lens)]
        bounds = [prompts.begin, prompts.end, *keys]
        kpe = None if tokens.kpe is None else kpe[0]
        return _attend(tokens, k_nope, kpe, v, bounds, prior, params, new=False)

    # The result of no key. Nobody reads its out, except `merge`.
    rows, d_v = tokens.q_nope.shape[:2], weights.w_uv.shape[-1]
    new = lax.empty if params.axis_name is None else jnp.zeros
    state = new((*rows, d_v), jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32)
    # A loop's state varies over the same manual axes as what is added to it.
    given = jax.tree.leaves((tokens, weights, cache, prompts))
    out, lse, *_ = _dispatch.align_manual_axes([*state, *given])
    num_chunks = -(-page_end[-1] // chunk_pages)
    out, lse = lax.fori_loop(0, num_chunks, add_chunk, (out, lse))
    return (out, lse) if params.axis_name is None else merge(out, lse, axis_name=params.axis_name)


def _attend(
    tokens: ops.Tokens,
    k_nope: Array,
    kpe: Array | None,
    v: Array,
    bounds: Sequence[Array],
    prior: Sequence[Array],
    params: ops.Params,
    *,
    new: bool,
) -> _State:
    """Attend from the new tokens to the new ones, or to cached ones, and add what is prior."""
    prior_out, prior_lse = prior or (None, None)
    operands = primitive.Operands(
        tokens.q_nope, tokens.q_pe, k_nope, kpe, v, jnp.stack(bounds), prior_out, prior_lse
    )
    out, lse = primitive.bind(
        operands,
        primitive.Params(
            sm_scale=params.sm_scale,
            causal=new,
            out_dtype=str(tokens.q_nope.dtype) if new else "float32",
            implementation=params.implementation or "",
        ),
    )
    return out, lse

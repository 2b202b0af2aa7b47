"""The definition of index_topk in float32 jax.numpy."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mla.kv_cache import bound_of_lengths, pool_sizes
from jax_mla.ops import _checks, _eager, _index, _ragged

OP = "jax_mla.reference.index_topk"
LAST = np.iinfo(np.int32).max


@_eager.lets_infs_pass
@_eager.definition
def index_topk(
    q: Annotated[Array, "[tokens, index_heads, d]"],
    weights: Annotated[Array, "[tokens, index_heads] float32"],
    index_pages: Array,
    page_table: Annotated[Array, "[seqs, max_pages_per_seq] int32"],
    seq_lens: Annotated[Array, "[seqs] int32"],
    cu_q_lens: Annotated[Array, "[seqs + 1] int32"] | None = None,
    num_seqs: Array | int | None = None,
    *,
    k: int,
    layer: Array | int | None = None,
    return_positions: bool = False,
    return_scores: bool = False,
    max_seq_len: int | None = None,
    page_begin: Array | int = 0,
) -> tuple[Array, ...]:
    """Choose for each query the k keys with the largest scores, by definition.

    With p the place of the query in its sequence, for each t in [0, p] whose page the pool holds:

        score(t) = scale(t) * sum over heads h of weights[h] * relu(q[h] . key(t))

    scale(t) is that of a key in FP8, whose codes are key(t), and 1 otherwise. A NaN is below minus
    infinity, and -0 is 0. Of equal scores the one with the lower t comes first. Everything is
    computed in float32 at the highest precision. A query that sees at most k keys has no choice:
    their scores are taken for 0.

    Args:
      q: [tokens, index_heads, d], any float dtype or float8_e4m3fn.
      weights: [tokens, index_heads] float32.
      index_pages: [num_pages, page_size, d] or, in FP8, uint8 [num_pages, page_size, 132]; with
        num_layers in front if there is a layer.
      page_table: [seqs, max_pages_per_seq] int32, global page ids.
      seq_lens: [seqs] int32. Tokens in the cache, including the new ones; clamped.
      cu_q_lens: [seqs + 1] int32, which of the tokens belong to which sequence, as for
        `jax_mla.ragged_paged_attention`. None: each sequence has tokens / seqs.
      num_seqs: how many sequences the step has; None for all.
      k: how many keys are chosen.
      layer: which layer of a stacked pool; one outside the pool has no keys.
      return_positions: whether to return places in the sequence in place of slots.
      return_scores: whether to return the scores too.
      max_seq_len: bound of the lengths; None for the width of page_table.
      page_begin: global id of the pool's first page.

    Returns:
      chosen: [tokens, k] int32: slots (page * page_size + place in the page) or positions, by
        ascending position, then -1.
      lens: [tokens] int32, how many were chosen: k, or as many keys as there are.
      scores: only with return_scores. [tokens, k] float32, then minus infinity.

    Source: DeepSeek-V3.2, section 2.1 (lightning indexer).
    """
    _checks.rank(OP, "q", q, (3,), "[tokens, index_heads, d]")
    _checks.rank(OP, "index_pages", index_pages, (3 + (layer is not None),), _index.POOL_DIMS)
    num_tokens, num_rows = q.shape[0], page_table.shape[0]
    page_size = pool_sizes(index_pages, layer is not None).page_size
    bound = bound_of_lengths(page_table.shape[1] * page_size, max_seq_len or 0)
    if cu_q_lens is None:
        cu_q_lens = jnp.arange(num_rows + 1, dtype=jnp.int32) * (num_tokens // num_rows)
    bounds = _ragged.bounds(jnp.asarray(cu_q_lens), num_seqs, num_tokens)
    lens = jnp.clip(jnp.asarray(seq_lens), 0, bound).astype(jnp.int32)
    sequence, place = _ragged.places(bounds, lens, num_tokens)
    own = jnp.maximum(sequence, 0)

    def choose_one(token: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        q, weights, own, place = token
        keys = _index.gather_keys(index_pages, page_table[own][None], layer, page_begin)
        scores = _scores(q, weights, keys)
        scores = jnp.where(place < k, 0, scores)  # no choice
        position = jnp.arange(scores.shape[0], dtype=jnp.int32)
        return choose(position, scores, keys.owned[0] & (position <= place), k)

    positions, lens, scores = lax.map(choose_one, (q, weights, own, place))
    chosen = (
        positions if return_positions else _index.slots_at(page_table, own, positions, page_size)
    )
    return (chosen, lens, scores) if return_scores else (chosen, lens)


def _scores(q: Array, weights: Array, keys: _index.Keys) -> Array:
    """Return the scores of one query, [tokens]."""
    dots = jnp.einsum(
        "hd,td->ht", q.astype(jnp.float32), keys.values[0], precision=lax.Precision.HIGHEST
    )
    terms = weights.astype(jnp.float32)[:, None] * jnp.maximum(dots, 0)
    scores = jnp.sum(terms, axis=0)
    return scores if keys.scales is None else scores * keys.scales[0]


def choose(
    positions: Array, scores: Array, is_candidate: Array, k: int
) -> tuple[Array, Array, Array]:
    """Choose the k best of some keys.

    Args:
      positions: [n] int32.
      scores: [n] float32.
      is_candidate: [n] bool.
      k: how many.

    Returns:
      positions [k], ascending, then -1; how many; their scores [k], then minus infinity.
    """
    n = positions.shape[0]
    scores = jnp.where(scores == 0, 0, scores)
    # A sort puts NaN last.
    order = (~is_candidate).astype(jnp.int32), -scores, positions
    absent, negated, best = (x[: min(k, n)] for x in lax.sort(order, num_keys=3))
    is_chosen = absent == 0
    place, negated = lax.sort((jnp.where(is_chosen, best, LAST), negated), num_keys=1)
    count = jnp.sum(is_chosen, dtype=jnp.int32)
    is_chosen = jnp.arange(place.shape[0], dtype=jnp.int32) < count
    place, scores = jnp.where(is_chosen, place, -1), jnp.where(is_chosen, -negated, -jnp.inf)
    rest = k - place.shape[0]
    place = jnp.concatenate([place, jnp.full((rest,), -1, jnp.int32)])
    scores = jnp.concatenate([scores, jnp.full((rest,), -jnp.inf, jnp.float32)])
    return place, count, scores


choose_each = jax.vmap(choose, in_axes=(0, 0, 0, None))

"""`mixed_attention` on arguments that have been checked."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_mla import _primitive
from jax_mla.kv_cache import (
    FP8_E4M3_KPE_BF16,
    as_pools,
    find_format,
    has_packs,
    pool_sizes,
    stored_format,
    width,
)
from jax_mla.ops import _ragged
from jax_mla.ops.append.api import append
from jax_mla.ops.decode.ragged import ragged_paged_attention
from jax_mla.ops.prefill import operands as prefill
from jax_mla.ops.prefill import run as prefill_run
from jax_mla.ops.prefill.operands import REFERENCE, SM90_OR_XLA, Cache, Tokens, Weights

OP = "jax_mla.mixed_attention"
# Below this product of tokens and heads, choosing costs more than it saves where nothing is cached,
# which no static size tells. docs/kernels/prefill_sm90.md has the figures.
MIN_TOKEN_HEADS = 2**15


class Params(NamedTuple):
    """The static parameters of a call, see `mixed_attention`.

    Attributes:
      implementation: of `prefill`; None if all sequences are attended absorbed.
    """

    sm_scale: float
    max_absorbed_tokens: int
    prefix_chunk: int
    has_layer: bool
    has_page_begin: bool
    kv_format: str | None
    backend: str | None
    implementation: str | None
    sliding_window: int = 0
    soft_cap: float = 0.0


class Choice(NamedTuple):
    """Which tokens are attended absorbed, and where they are among all.

    Attributes:
      is_absorbed: [seqs] bool.
      bounds: [seqs + 1] int32. Where the absorbed tokens of each sequence begin in `source`.
      source: [max_absorbed_tokens] int32, ascending: the index of each absorbed token in the step.
        Behind them, indices past the last token.
    """

    is_absorbed: Array
    bounds: Array
    source: Array


def min_prefill_tokens(weights: Weights, d_kpe: int) -> int:
    """Return from how many new tokens on a sequence takes fewer multiplications in `prefill`.

    Each new token saves some multiplications per key, and each key has to be computed once. So the
    number does not depend on the length of the sequence.
    """
    _, d_nope, d_ckv = weights.w_uk.shape
    d_v = weights.w_uv.shape[-1]
    to_make_a_key = d_ckv * (d_nope + d_v)
    absorbed, unabsorbed = d_ckv + d_kpe + d_ckv, d_nope + d_kpe + d_v  # of a query and a key
    saved = absorbed - unabsorbed
    return -(-to_make_a_key // saved) if saved > 0 else 2**31 - 1


def choose(bounds: Array, min_tokens: int, max_absorbed_tokens: int, num_tokens: Any) -> Choice:
    """Choose for each sequence: those with the fewest new tokens are attended absorbed.

    Args:
      bounds: [seqs + 1] int32, as `_ragged.bounds` returns them.
      min_tokens: new tokens from which on a sequence goes to `prefill`.
      max_absorbed_tokens: the most tokens that are attended absorbed.
      num_tokens: tokens of the step.
    """
    q_lens = jnp.diff(bounds)
    seq = jnp.arange(q_lens.shape[0], dtype=jnp.int32)
    is_shorter = q_lens[None, :] < q_lens[:, None]
    is_before = (q_lens[None, :] == q_lens[:, None]) & (seq[None, :] <= seq[:, None])
    # With those that are served before it, and its own.
    used = jnp.sum(jnp.where(is_shorter | is_before, q_lens[None, :], 0), axis=1, dtype=jnp.int32)
    is_absorbed = (q_lens < min_tokens) & (used <= max_absorbed_tokens)
    ends = jnp.cumsum(jnp.where(is_absorbed, q_lens, 0), dtype=jnp.int32)
    absorbed_bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
    sequence = _ragged.sequence_of_tokens(absorbed_bounds, max_absorbed_tokens)
    place = jnp.arange(max_absorbed_tokens, dtype=jnp.int32)
    source = bounds[sequence] + place - absorbed_bounds[sequence]
    return Choice(is_absorbed, absorbed_bounds, jnp.where(sequence < 0, num_tokens + place, source))


@functools.partial(jax.jit, static_argnames="params", inline=True)
def attend(
    tokens: Tokens,
    weights: Weights,
    cache: Cache,
    cu_q_lens: Array,
    num_seqs: Array | None,
    *,
    params: Params,
) -> tuple[Array, Sequence[Array]]:
    """Write the new rows and attend.

    Args:
      tokens: the new tokens.
      weights: the up-projections.
      cache: the cache.
      cu_q_lens: [seqs + 1] int32.
      num_seqs: scalar of integers, sequences that are present, or None for all.
      params: the static parameters.

    Returns:
      out: [tokens, heads, d_v], dtype of q_nope.
      pools: those of the cache with the new rows.
    """
    tokens, weights, cache = _primitive.without_derivative(OP, (tokens, weights, cache))
    bounds = _ragged.bounds(cu_q_lens, num_seqs, tokens.ckv.shape[0])
    absorbed = functools.partial(_attend_absorbed, params=params)
    either = functools.partial(_attend_either, params=params)
    operands = tokens, weights, cache, bounds
    num_tokens, num_heads, _ = tokens.q_nope.shape
    is_chosen = params.implementation == SM90_OR_XLA
    is_too_small = isinstance(num_tokens, int) and (
        num_tokens < min_prefill_tokens(weights, width(tokens.kpe))
        or (is_chosen and num_tokens * num_heads < MIN_TOKEN_HEADS)
    )
    if params.implementation is None or is_too_small:
        return absorbed(*operands)
    if is_chosen:
        return lax.platform_dependent(*operands, cuda=either, default=absorbed)
    return either(*operands)


def _attend_absorbed(
    tokens: Tokens, weights: Weights, cache: Cache, bounds: Array, *, params: Params
) -> tuple[Array, Sequence[Array]]:
    """Attend with W_UK applied to the queries, and W_UV to the result."""
    out, kv_pages = ragged_paged_attention(
        jnp.einsum("thn,hnc->thc", tokens.q_nope, weights.w_uk),
        *tokens[1:],
        seq_lens=cache.seq_lens,
        cu_q_lens=bounds,
        sm_scale=params.sm_scale,
        backend=params.backend,
        sliding_window=params.sliding_window or None,
        soft_cap=params.soft_cap or None,
        **_cache_arguments(cache, params, has_kpe=tokens.kpe is not None),
    )
    return jnp.einsum("thc,hcv->thv", out, weights.w_uv), as_pools(OP, kv_pages)


def _attend_either(
    tokens: Tokens, weights: Weights, cache: Cache, bounds: Array, *, params: Params
) -> tuple[Array, Sequence[Array]]:
    """Attend some sequences absorbed, and the others by `prefill`.

    All rows are written before `prefill` reads the cache: XLA would copy a pool that is written
    afterwards.
    """
    num_tokens = tokens.ckv.shape[0]
    choice = choose(
        bounds,
        min_prefill_tokens(weights, width(tokens.kpe)),
        prefill.at_most(params.max_absorbed_tokens, num_tokens),
        num_tokens,
    )
    pools = _append_others(tokens, cache, bounds, choice, params)
    some = jax.tree.map(lambda x: x.at[choice.source].get(mode="clip"), tokens)
    cache = cache._replace(kv_pages=tuple(pools))
    few, pools = _attend_absorbed(some, weights, cache, choice.bounds, params=params)
    cache = cache._replace(
        kv_pages=tuple(pools), seq_lens=jnp.where(choice.is_absorbed, 0, cache.seq_lens)
    )
    out, _ = prefill_run.attend(
        tokens, weights, cache, bounds, None, None,
        params=prefill.Params(
            sm_scale=params.sm_scale, max_q_len=num_tokens, prefix_chunk=params.prefix_chunk,
            has_layer=params.has_layer, axis_name=None, implementation=params.implementation,
            kv_format=params.kv_format, sliding_window=params.sliding_window,
            soft_cap=params.soft_cap,
        ),
    )  # fmt: skip
    out = out.at[choice.source].set(few, mode="drop", indices_are_sorted=True, unique_indices=True)
    return out, pools


def _append_others(
    tokens: Tokens, cache: Cache, bounds: Array, choice: Choice, params: Params
) -> Sequence[Array]:
    """Write the rows of the sequences that are not attended absorbed."""
    num_tokens = tokens.ckv.shape[0]
    capacity = cache.page_table.shape[1] * pool_sizes(cache.kv_pages[0], params.has_layer).page_size
    is_written = ~choice.is_absorbed & (cache.seq_lens >= 0) & (cache.seq_lens <= capacity)
    sequence, place = _ragged.places(bounds, cache.seq_lens, num_tokens)
    positions = jnp.where(is_written[sequence], place, -1)
    kv_pages = append(
        ckv=tokens.ckv,
        kpe=tokens.kpe,
        positions=positions,
        cu_q_lens=bounds,
        backend=REFERENCE if params.backend == REFERENCE else None,
        **_cache_arguments(cache, params, has_kpe=tokens.kpe is not None),
    )
    return as_pools(OP, kv_pages)


def _cache_arguments(cache: Cache, params: Params, *, has_kpe: bool) -> dict[str, Any]:
    """Return the arguments with which `append` and `ragged_paged_attention` find the cache."""
    pools = list(cache.kv_pages)
    arguments: dict[str, Any] = {
        "kv_pages": pools[0] if len(pools) == 1 else tuple(pools),
        "page_table": cache.page_table,
        "layer": cache.layer[0] if params.has_layer else None,
        "packs": has_packs(pools, params.has_layer),
        "page_begin": cache.page_begin[0] if params.has_page_begin else None,
        "kv_format": params.kv_format,
    }
    if cache.kv_scale is not None:
        ckv_scale, kpe_scale = cache.kv_scale[0]
        stored = stored_format(find_format(OP, params.kv_format), pools)
        is_one = stored == FP8_E4M3_KPE_BF16 or not has_kpe  # kpe has none
        arguments["kv_scale"] = ckv_scale if is_one else (ckv_scale, kpe_scale)
    return arguments

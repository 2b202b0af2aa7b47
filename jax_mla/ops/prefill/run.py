"""Which of the ways to attend a call of `prefill` takes, once its arguments have been checked."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_mla import _primitive
from jax_mla.ops import _sink
from jax_mla.ops.prefill import operands as ops
from jax_mla.ops.prefill import packed, padded
from jax_mla.ops.prefill.operands import REFERENCE, SM90, SM90_OR_XLA, XLA


@functools.partial(jax.jit, static_argnames="params", inline=True)
def attend(
    tokens: ops.Tokens,
    weights: ops.Weights,
    cache: ops.Cache | None,
    cu_q_lens: Array | None,
    num_seqs: Array | None,
    sink: Array | None,
    *,
    params: ops.Params,
) -> tuple[Array, Array]:
    """Attend.

    Args:
      tokens: the new tokens.
      weights: the up-projections.
      cache: the cache, or None if nothing is cached.
      cu_q_lens: [seqs + 1] int32. None: all sequences have as many tokens; one without a cache.
      num_seqs: scalar of integers, sequences that are present, or None for all.
      sink: [heads] float32, or None for none.
      params: the static parameters.

    Returns:
      out: [tokens, heads, d_v], dtype of q_nope.
      lse: [tokens, heads] float32.
    """
    if cu_q_lens is None:
        num_tokens, seqs = tokens.ckv.shape[0], 1 if cache is None else cache.page_table.shape[0]
        cu_q_lens = jnp.arange(seqs + 1, dtype=jnp.int32) * (num_tokens // seqs)
    operands = tokens, weights, cache, cu_q_lens, num_seqs
    operands = _primitive.without_derivative(ops.OP, operands)

    def run(name: str | None, *operands: Any) -> tuple[Array, Array]:
        is_packed = name in (SM90, SM90_OR_XLA, REFERENCE) and not params.has_masks
        prefill = packed.prefill if is_packed else padded.prefill
        return prefill(*operands, params=params._replace(implementation=name))

    if params.implementation == SM90_OR_XLA:
        out, lse = lax.platform_dependent(
            *operands,
            cuda=functools.partial(run, SM90_OR_XLA),
            default=functools.partial(run, XLA),
        )
    else:
        out, lse = run(params.implementation, *operands)
    return _sink.apply(out, lse, sink), lse

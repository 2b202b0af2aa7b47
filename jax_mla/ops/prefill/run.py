"""Which of the ways to attend a call of `prefill` takes, once its arguments have been checked."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import Array, lax

from jax_mla import _primitive
from jax_mla.ops.prefill import operands as ops
from jax_mla.ops.prefill import packed, padded
from jax_mla.ops.prefill.operands import REFERENCE, SM90, SM90_OR_XLA, XLA


@functools.partial(jax.jit, static_argnames="params", inline=True)
def attend(*operands: Any, params: ops.Params) -> tuple[Array, Array]:
    """Attend.

    Args:
      *operands: `Tokens`, `Weights`, `Cache` or None, cu_q_lens [seqs + 1] int32, and num_seqs, an
        int32 scalar or None.
      params: the static parameters.

    Returns:
      out: [tokens, heads, d_v], dtype of q_nope.
      lse: [tokens, heads] float32.
    """

    operands = _primitive.without_derivative(ops.OP, operands)

    def run(name: str | None, *operands: Any) -> tuple[Array, Array]:
        prefill = packed.prefill if name in (SM90, SM90_OR_XLA, REFERENCE) else padded.prefill
        return prefill(*operands, params=params._replace(implementation=name))

    if params.implementation != SM90_OR_XLA:
        return run(params.implementation, *operands)
    return lax.platform_dependent(
        *operands,
        cuda=functools.partial(run, SM90_OR_XLA),
        default=functools.partial(run, XLA),
    )

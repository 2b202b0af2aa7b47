"""The public function `merge`."""

from __future__ import annotations

import functools
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from jax_mla._mesh import _collectives
from jax_mla.ops import _checks, _eager

OP = "jax_mla.merge"


@_eager.lets_infs_pass
def merge(
    outs: Annotated[Array, "[parts, *rows, d_ckv]"],
    lses: Annotated[Array, "[parts, *rows] float32"],
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[Array, Array]:
    """Combine attention over disjoint sets of keys into attention over all of them.

        lse = log(sum over parts of exp(lses))
        out = sum over parts of exp(lses - lse) * outs

    A part without keys (out 0, lse -inf) does not change the result. Its lse may also be +inf,
    FlashAttention's convention. A row that is empty in every part gets 0 and -inf. The function is
    differentiable.

    Args:
      outs: [parts, *rows, d_ckv], or with `axis_name` [*rows, d_ckv]; bfloat16, float16 or float32.
        The output of each part.
      lses: [parts, *rows] float32, or with `axis_name` [*rows]. The log-sum-exp of each part,
        natural logarithm.
      axis_name: one or several mapped or manual mesh axes. Then each device along the axes holds
        one part, and all of them get the result, by one max and one sum reduction.

    Returns:
      out: [*rows, d_ckv], dtype of outs.
      lse: [*rows] float32, natural logarithm.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: the shapes do not fit each other, or axis_name names no mapped or manual axis.
    """
    outs = _checks.array(OP, "outs", outs)
    lses = _checks.array(OP, "lses", lses, ("float32",))
    _checks.dtype(OP, "outs", outs, _checks.FLOATS)
    _checks.dtype(OP, "lses", lses, ("float32",))
    _checks.shape(OP, "lses", lses, outs.shape[:-1], " as in outs")
    rank, dims = (2, "[parts, ..., d_ckv]") if axis_name is None else (1, "[..., d_ckv]")
    if outs.ndim < rank:
        raise ValueError(f"{OP}: outs: expected {dims}, got shape {outs.shape}")
    if axis_name is not None:
        return _merge_over_axes(outs, lses, _checks.axis_names(OP, axis_name))
    return _merge_parts(outs, lses)


def _empty_is_minus_inf(lses: Array) -> Array:
    return jnp.where(lses == jnp.inf, -jnp.inf, lses)


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _merge_over_axes(out: Array, lse: Array, axes: tuple[str, ...]) -> tuple[Array, Array]:
    return _collectives.merge_over_axes(out, _empty_is_minus_inf(lse), axes)


@functools.partial(jax.jit, inline=True)
def _merge_parts(outs: Array, lses: Array) -> tuple[Array, Array]:
    """Merge along the first dimension; one compiled function outside `jit`."""
    lses = _empty_is_minus_inf(lses)
    peak = jnp.max(lses, axis=0, initial=-jnp.inf)
    safe_peak = jnp.where(peak == -jnp.inf, 0, peak)
    weights = jnp.exp(lses - safe_peak[None])
    total = jnp.sum(weights, axis=0)
    safe_total = jnp.where(total == 0, 1, total)
    out = jnp.sum(outs.astype(jnp.float32) * weights[..., None], axis=0) / safe_total[..., None]
    lse = jnp.where(total == 0, -jnp.inf, safe_peak + jnp.log(safe_total))
    return out.astype(outs.dtype), lse

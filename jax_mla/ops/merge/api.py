# ruff: noqa: F722, F821, UP037
"""Public `merge`: combine attention over disjoint sets of keys by log-sum-exp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jax_mla import _collectives, _sharding
from jax_mla.ops import _checks

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

OP = "jax_mla.merge"


def merge(
    outs: Float[Array, "parts *rows d_ckv"],
    lses: Float[Array, "parts *rows"],
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[Array, Array]:
    """Merge partial results: lse = log(sum exp(lses)), out = sum exp(lses - lse) * outs.

    A part without keys (out 0, lse -inf) is neutral; a row that is empty in every part stays 0
    and -inf. Differentiable, as plain jax.numpy is.

    Args:
      outs: partial outputs over the leading axis; [*rows, d_ckv] with `axis_name`.
      lses: their log-sum-exps, natural logarithm; [*rows] with `axis_name`.
      axis_name: merge over these manual mesh axes (inside `shard_map`) instead of over a leading
        axis: one max and one sum reduction.

    Returns:
      out: [*rows, d_ckv], dtype of outs.
      lse: [*rows] float32.

    Raises:
      TypeError: not arrays of floats.
      ValueError: shapes that do not fit.
    """
    outs = _checks.array(OP, "outs", outs)
    lses = _checks.array(OP, "lses", lses, ("float32",))
    _checks.dtype(OP, "outs", outs, _checks.FLOATS)
    _checks.dtype(OP, "lses", lses, ("float32",))
    _checks.shape(OP, "lses", lses, outs.shape[:-1], " as in outs")
    if axis_name is not None:
        names = _sharding.axes_of(axis_name)
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f"{OP}: axis_name: expected names of mesh axes, got {axis_name!r}")
        return _collectives.merge_over_axes(outs, lses, names)
    if outs.ndim < 2:
        raise ValueError(f"{OP}: outs: expected [parts, ..., d_ckv], got shape {outs.shape}")
    peak = jnp.max(lses, axis=0, initial=-jnp.inf)
    safe_peak = jnp.where(peak == -jnp.inf, 0, peak)
    weights = jnp.exp(lses - safe_peak[None])
    total = jnp.sum(weights, axis=0)
    safe_total = jnp.where(total == 0, 1, total)
    out = jnp.sum(outs.astype(jnp.float32) * weights[..., None], axis=0) / safe_total[..., None]
    lse = jnp.where(total == 0, -jnp.inf, safe_peak + jnp.log(safe_total))
    return out.astype(outs.dtype), lse

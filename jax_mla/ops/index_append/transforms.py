"""What an index key can go through on its way into the pool: LayerNorm, then a rotation."""

from __future__ import annotations

from typing import Annotated

import jax.numpy as jnp
from jax import Array, lax

from jax_mla.ops import _checks, _eager
from jax_mla.ops.append.transforms import as_rank, rotate, rounded


@_eager.definition
def layer_norm(
    x: Annotated[Array, "[..., d]"],
    weight: Annotated[Array, "[d]"],
    bias: Annotated[Array, "[d]"] | None = None,
    eps: float = 1e-6,
) -> Array:
    """Subtract the mean of rows, divide by the root of their variance, apply weight and bias.

    All in float32; the result is rounded to the dtype of `x`.

    Args:
      x: [..., d], any float dtype.
      weight: [d].
      bias: [d]; None for none.
      eps: added to the variance.

    Returns:
      An array like `x`.
    """
    op = "jax_mla.reference.layer_norm"
    given = [("weight", weight)] + ([] if bias is None else [("bias", bias)])
    for name, array in (("x", x), *given):
        _checks.shaped(op, name, array)
    for name, array in given:
        _checks.shape(op, name, array, x.shape[-1:], ", the width of x")
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    normed = centred * lax.rsqrt(variance + jnp.asarray(eps, jnp.float32))
    normed = normed * as_rank(weight.astype(jnp.float32), x.ndim)
    if bias is not None:
        normed = normed + as_rank(bias.astype(jnp.float32), x.ndim)
    return rounded(normed, x.dtype)


def rotate_part(
    x: Array, rope_table: Array, positions: Array, *, interleaved: bool, last: bool
) -> Array:
    """Rotate the first or last values of rows [*tokens, d], as many as the table is wide."""
    width, d = rope_table.shape[-1], x.shape[-1]
    begin = d - width if last else 0
    before, part, after = jnp.split(x, [begin, begin + width], axis=-1)
    part = rotate(part, rope_table, positions, interleaved=interleaved)
    return jnp.concatenate([before, part, after], axis=-1)

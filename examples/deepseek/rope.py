"""Rotary position embedding (RoPE), with YaRN and LongRoPE.

In DeepSeek's weights the two values of a rotated pair are side by side: (x0, x1), (x2, x3), and so
on. MiniCPM3's pairs are (x_i, x_{i + d/2}).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .config import Rope, yarn_mscale


def inverse_frequencies(rope: Rope, dim: int, max_positions: int) -> tuple[np.ndarray, float]:
    """Compute the frequencies, and the factor on cos and sin.

    Args:
      rope: kind and parameters.
      dim: number of rotated dimensions, `d_kpe`.
      max_positions: longest sequence of this run. LongRoPE chooses its factors by it. They cannot
        change during the run, because the keys in the cache are already rotated.

    Returns:
      [dim / 2] float32 in radians per position, and the factor.

    Source: YaRN, arXiv:2309.00071; LongRoPE, arXiv:2402.13753.
    """
    frequencies = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float32) / dim)
    if rope.kind == "default":
        return frequencies, 1.0
    if rope.kind == "longrope":
        is_long = max_positions > rope.original_max_positions
        divisors = rope.long_factors if is_long else rope.short_factors
        growth = 1 + math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_positions)
        amplitude = math.sqrt(growth) if rope.amplitude is None else rope.amplitude
        return frequencies / np.asarray(divisors, np.float32), amplitude

    def boundary(rotations: float) -> float:
        """Return the index of the pair that rotates `rotations` times over the original context."""
        periods = rope.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(periods) / (2 * math.log(rope.theta))

    low = max(math.floor(boundary(rope.beta_fast)), 0)
    high = min(math.ceil(boundary(rope.beta_slow)), dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3)
    slowed = np.clip(ramp, 0, 1)  # 0: keep the frequency; 1: divide it by `factor`
    amplitude = rope.amplitude
    if amplitude is None:
        amplitude = yarn_mscale(rope.factor, 1.0)
        if rope.mscale and rope.mscale_all_dim:
            denominator = yarn_mscale(rope.factor, rope.mscale_all_dim)
            amplitude = yarn_mscale(rope.factor, rope.mscale) / denominator
    return frequencies * (1 - slowed) + frequencies / rope.factor * slowed, amplitude


def angles(rope: Rope, dim: int, max_positions: int, positions: jax.Array) -> jax.Array:
    """Compute the cosines and sines for `positions`.

    Args:
      rope: kind and parameters.
      dim: number of rotated dimensions.
      max_positions: longest sequence of this run.
      positions: [*tokens] int32.

    Returns:
      [2, *tokens, dim / 2] float32.
    """
    frequencies, amplitude = inverse_frequencies(rope, dim, max_positions)
    phase = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.cos(phase), jnp.sin(phase)]) * jnp.float32(amplitude)


def query_scales(rope: Rope, positions: jax.Array) -> jax.Array:
    """Return what the queries at [*tokens] positions are multiplied by, float32."""
    steps = jnp.maximum(positions, 0) // rope.original_max_positions
    return 1 + rope.query_beta * jnp.log1p(steps.astype(jnp.float32))


def rotate(x: jax.Array, cos_sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotate pairs of values in float32. Both values stay in their places.

    Args:
      x: [*tokens, dim] or [*tokens, heads, dim].
      cos_sin: from `angles`.
      interleaved: whether a pair is (x_2i, x_{2i+1}); otherwise it is (x_i, x_{i + dim/2}).

    Returns:
      An array like `x`.
    """
    has_heads = x.ndim == cos_sin.ndim
    cos, sin = (part[..., None, :] if has_heads else part for part in cos_sin)
    axis = -1 if interleaved else -2
    pairs = (-1, 2) if interleaved else (2, x.shape[-1] // 2)
    x32 = x.astype(jnp.float32).reshape(*x.shape[:-1], *pairs)
    a, b = (jax.lax.index_in_dim(x32, i, axis, keepdims=False) for i in (0, 1))
    rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis)
    return rotated.reshape(x.shape).astype(x.dtype)

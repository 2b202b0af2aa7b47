"""Rotary position embedding in half-split order.

DeepSeek's published weights hold rotation pairs side by side (x0, x1), (x2, x3), ...; the loader
reorders those weight columns once (`half_split_order`), so that the model only ever rotates
(x_i, x_{i + d/2}). A permutation shared by queries and keys leaves every score as it was.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .config import Rope, yarn_mscale


def half_split_order(dim: int) -> np.ndarray:
    """Column order that turns interleaved rotation pairs into half-split ones."""
    return np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2)])


def inverse_frequencies(rope: Rope, dim: int, max_positions: int) -> tuple[np.ndarray, float]:
    """Radians per position, and the factor on cos and sin.

    Args:
      rope: kind and parameters.
      dim: rotated dimensions, `d_kpe`.
      max_positions: longest sequence of this run. LongRoPE chooses its factors by it once, because
        keys in the cache keep the rotation they were written with.

    Returns:
      float32 [dim / 2] and the amplitude.

    Source: YaRN, arXiv:2309.00071; LongRoPE, arXiv:2402.13753.
    """
    frequencies = rope.theta ** -(np.arange(0, dim, 2, dtype=np.float32) / dim)
    if rope.kind == "default":
        return frequencies, 1.0
    if rope.kind == "longrope":
        is_long = max_positions > rope.original_max_positions
        divisors = rope.long_factors if is_long else rope.short_factors
        if len(divisors) != dim // 2:
            raise ValueError(f"rope_scaling: expected {dim // 2} factors, got {len(divisors)}")
        growth = 1 + math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_positions)
        amplitude = math.sqrt(growth) if rope.amplitude is None else rope.amplitude
        return frequencies / np.asarray(divisors, np.float32), amplitude

    def boundary(rotations: float) -> float:
        """The pair index that turns `rotations` times over the original context."""
        periods = rope.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(periods) / (2 * math.log(rope.theta))

    low = max(math.floor(boundary(rope.beta_fast)), 0)
    high = min(math.ceil(boundary(rope.beta_slow)), dim - 1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 1e-3)
    slowed = np.clip(ramp, 0, 1)  # 0: extrapolate as trained; 1: interpolate by `factor`
    amplitude = rope.amplitude
    if amplitude is None:
        amplitude = yarn_mscale(rope.factor, 1.0)
        if rope.mscale and rope.mscale_all_dim:
            denominator = yarn_mscale(rope.factor, rope.mscale_all_dim)
            amplitude = yarn_mscale(rope.factor, rope.mscale) / denominator
    return frequencies * (1 - slowed) + frequencies / rope.factor * slowed, amplitude


def angles(rope: Rope, dim: int, max_positions: int, positions: jax.Array) -> jax.Array:
    """Cosines and sines for `positions`.

    Args:
      rope: kind and parameters.
      dim: rotated dimensions.
      max_positions: longest sequence of this run.
      positions: [batch, q_len] int32.

    Returns:
      float32 [2, batch, q_len, dim / 2].
    """
    frequencies, amplitude = inverse_frequencies(rope, dim, max_positions)
    phase = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.cos(phase), jnp.sin(phase)]) * jnp.float32(amplitude)


def rotate(x: jax.Array, cos_sin: jax.Array) -> jax.Array:
    """Rotate the pairs (x_i, x_{i + d/2}) in float32.

    Args:
      x: [batch, q_len, ..., dim].
      cos_sin: from `angles`.

    Returns:
      Like `x`.
    """
    extra = (1,) * (x.ndim - 3)
    cos, sin = cos_sin.reshape(*cos_sin.shape[:3], *extra, cos_sin.shape[-1])
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

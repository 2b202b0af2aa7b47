"""What a row can go through on its way into the cache: the norm of ckv, the rotation of kpe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jax_mla.ops import _checks, _eager

MAX_VALUES = 2**30  # of a table
_OF_YARN = (
    "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "attention_factor",
)  # fmt: skip
_SERVED = ("rope_type", "type", "rope_theta", *_OF_YARN)
_ONLY = {"truncate": True, "apply_yarn_scaling": True, "partial_rotary_factor": 1.0}


@_eager.definition
def rms_norm(x: Annotated[Array, "[..., d]"], weight: Annotated[Array, "[d]"], eps: float) -> Array:
    """Divide rows by their root mean square, and multiply them by a weight.

    Both steps are in float32, and the result of each is rounded to the dtype of `x`.

    Args:
      x: [..., d], any float dtype.
      weight: [d].
      eps: added to the mean square.

    Returns:
      An array like `x`.
    """
    op = "jax_mla.reference.rms_norm"
    for name, array in (("x", x), ("weight", weight)):
        _checks.shaped(op, name, array)
    _checks.shape(op, "weight", weight, x.shape[-1:], ", the second argument and the width of x")
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32 * x32, axis=-1, keepdims=True) + jnp.asarray(eps, jnp.float32)
    normed = rounded(x32 * lax.rsqrt(mean), x.dtype).astype(jnp.float32)
    return rounded(normed * as_rank(weight.astype(jnp.float32), x.ndim), x.dtype)


@_eager.definition
def rotate(
    x: Annotated[Array, "[*tokens, d] or [*tokens, heads, d]"],
    rope_table: Annotated[Array, "[num_positions, d] float32"],
    positions: Annotated[Array, "[*tokens] int32"],
    *,
    interleaved: bool,
) -> Array:
    """Rotate pairs of values by the angles of their token's position, in float32.

    The pairs are (x[i], x[i + d / 2]), or (x[2 i], x[2 i + 1]) with `interleaved`. A pair (a, b)
    becomes (a cos - b sin, b cos + a sin), in the same two places.

    Args:
      x: [*tokens, d] or [*tokens, heads, d], any float dtype.
      rope_table: [num_positions, d] float32, see `jax_mla.rope_table`.
      positions: [*tokens] int32, clamped to the table.
      interleaved: whether the two values of a pair are adjacent: True for the published weights of
        DeepSeek, Kimi and GLM-5, False for MiniCPM3's.

    Returns:
      An array like `x`.
    """
    _check_rotation(x, rope_table, positions)
    d = x.shape[-1]
    rows = rope_table[jnp.clip(positions, 0, rope_table.shape[0] - 1)]
    heads = (1,) * (x.ndim - positions.ndim - 1)
    cos, sin = (
        part.reshape(*positions.shape, *heads, d // 2)
        for part in (rows[..., : d // 2], rows[..., d // 2 :])
    )
    x32 = x.astype(jnp.float32)
    a, b = (
        (x32[..., ::2], x32[..., 1::2]) if interleaved else (x32[..., : d // 2], x32[..., d // 2 :])
    )
    parts = a * cos - b * sin, b * cos + a * sin
    rotated = (
        jnp.stack(parts, axis=-1).reshape(x.shape)
        if interleaved
        else jnp.concatenate(parts, axis=-1)
    )
    return rounded(rotated, x.dtype)


def _check_rotation(x: Array, rope_table: Array, positions: Array) -> None:
    """Refuse arguments of `rotate` that do not fit each other, such as two that are swapped."""
    op = "jax_mla.reference.rotate"
    for name, array in (("x", x), ("rope_table", rope_table), ("positions", positions)):
        _checks.shaped(op, name, array)
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(
            f"{op}: positions: expected integers, the third argument, got {positions.dtype}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{op}: x: expected floats, the first argument, got {x.dtype}")
    _checks.dtype(op, "rope_table", rope_table, ("float32",), ", the second argument")
    expected = (None, x.shape[-1] if len(x.shape) else None)
    _checks.shape(
        op, "rope_table", rope_table, expected, ", the second argument and the width of x"
    )
    ndim = len(positions.shape)
    if len(x.shape) - ndim not in (1, 2) or tuple(x.shape[:ndim]) != tuple(positions.shape):
        raise ValueError(
            f"{op}: x: expected [*tokens, d] or [*tokens, heads, d] for positions of shape "
            f"{tuple(positions.shape)}, got shape {tuple(x.shape)}"
        )
    if x.shape[-1] % 2:
        raise ValueError(f"{op}: x: expected an even width, got shape {tuple(x.shape)}")


def rope_table(
    num_positions: int,
    d_kpe: int,
    *,
    theta: float | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
) -> Array:
    """Make the table of rotation angles that `append` takes.

    Args:
      num_positions: number of positions, from 0, that have a row.
      d_kpe: width of the rotary key.
      theta: base of the frequencies, `rope_theta` of a Hugging Face config. None: the theta of
        rope_scaling if it has one, otherwise 10000.
      rope_scaling: the config's `rope_scaling`, or its `rope_parameters`, which also have
        `rope_theta`: None, type "default", `rope_theta` alone, or type "yarn". With YaRN the table
        includes the frequencies and the factor on cos and sin (attention_factor, or derived from
        mscale and mscale_all_dim). The factor on the scores belongs in sm_scale.

    Returns:
      [num_positions, d_kpe] float32: the cosines of d_kpe / 2 angles, then their sines.

    Raises:
      TypeError: an argument or a field of the scaling has the wrong type.
      ValueError: a size or a number is out of range, theta and rope_scaling disagree, or the
        scaling has a type or a field that is not served.

    Source: RoFormer, arXiv:2104.09864; YaRN, arXiv:2309.00071, as in DeepSeek-V3's code.
    """
    op = "jax_mla.rope_table"
    num_positions = _checks.integer(op, "num_positions", num_positions)
    d_kpe = _checks.integer(op, "d_kpe", d_kpe)
    if num_positions < 1:
        raise ValueError(f"{op}: num_positions: expected at least 1, got {num_positions}")
    if d_kpe < 2 or d_kpe % 2:
        raise ValueError(f"{op}: d_kpe: expected an even number of at least 2, got {d_kpe}")
    if num_positions * d_kpe > MAX_VALUES:
        raise ValueError(
            f"{op}: num_positions, d_kpe: expected a table of at most 2^30 values, got "
            f"{num_positions} x {d_kpe}"
        )
    if rope_scaling is not None and not isinstance(rope_scaling, Mapping):
        got = _checks.static_kind(rope_scaling)
        raise TypeError(f"{op}: rope_scaling: expected None or a mapping, got {got}")
    scaling = rope_scaling or {}
    theta = _theta(op, theta, scaling.get("rope_theta"))
    frequencies = theta ** -(np.arange(0, d_kpe, 2, dtype=np.float64) / d_kpe)
    kind, factor = _kind(op, scaling), 1.0
    if kind == "yarn":
        frequencies, factor = _yarn(op, frequencies, theta, scaling)
    elif kind != "default" and set(scaling) - {"rope_theta"}:
        got = f"no type in {dict(scaling)}" if kind is None else repr(kind)
        raise ValueError(
            f"{op}: rope_scaling: expected None or type 'yarn' or 'default', got {got}"
        )
    _check_fields(op, scaling)
    phase = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
    table = np.concatenate([np.cos(phase), np.sin(phase)], axis=1) * factor
    return jnp.asarray(table, jnp.float32)


def _kind(op: str, scaling: Mapping[str, Any]) -> Any:
    """Return the scaling's type; refuse two that disagree, and "default" with YaRN's fields."""
    kinds = [scaling[name] for name in ("rope_type", "type") if scaling.get(name) is not None]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise ValueError(
            f"{op}: rope_scaling: expected the same rope_type and type, got {kinds[0]!r} and "
            f"{kinds[1]!r}"
        )
    kind = kinds[0] if kinds else None
    of_yarn = [name for name in _OF_YARN if scaling.get(name) is not None]
    if kind == "default" and of_yarn:
        raise ValueError(
            f"{op}: rope_scaling: expected type 'yarn' with {', '.join(of_yarn)}, got 'default'"
        )
    return kind


def _check_fields(op: str, scaling: Mapping[str, Any]) -> None:
    """Refuse what would change the angles or the scores, and is not served."""
    for field, value in scaling.items():
        if field in _ONLY:
            if value != _ONLY[field] and (value is not None or field == "truncate"):
                raise ValueError(
                    f"{op}: rope_scaling[{field!r}]: expected {_ONLY[field]!r}, got {value!r}"
                )
        elif field not in _SERVED and value is not None:
            known = ", ".join(sorted((*_SERVED, *_ONLY)))
            raise ValueError(
                f"{op}: rope_scaling[{field!r}]: expected no field but {known}, got {value!r}"
            )


def _theta(op: str, theta: float | None, of_scaling: float | None) -> float:
    """Return the base of the frequencies: the argument, or the field of the scaling."""
    if theta is not None:
        theta = _positive(op, "theta", theta)
    if of_scaling is None:
        return 10000.0 if theta is None else theta
    own = _positive(op, "rope_scaling['rope_theta']", of_scaling)
    if theta not in (None, own):
        raise ValueError(f"{op}: theta: expected None or {own}, as in rope_scaling, got {theta}")
    return own


def _yarn(
    op: str, frequencies: np.ndarray, theta: float, scaling: Mapping[str, Any]
) -> tuple[np.ndarray, float]:
    """Return YaRN's frequencies, and the factor on cos and sin."""
    missing = {"factor", "original_max_position_embeddings"} - set(scaling)
    if missing:
        raise ValueError(f"{op}: rope_scaling: expected {sorted(missing)}, got {sorted(scaling)}")
    if theta <= 1:
        raise ValueError(f"{op}: theta: expected a number above 1 with YaRN, got {theta}")

    def number(field: str) -> float:
        return _positive(op, f"rope_scaling[{field!r}]", scaling[field])

    def number_or(field: str, default: float) -> float:
        """Return a field that may be absent; null and 0 say that too, as in transformers."""
        return number(field) if scaling.get(field) not in (None, 0) else default

    factor, context = number("factor"), number("original_max_position_embeddings")
    d_kpe = 2 * len(frequencies)

    def boundary(rotations: float) -> float:
        """Return the index of the pair that turns `rotations` times over the original context."""
        return d_kpe * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    fast, slow = number_or("beta_fast", 32.0), number_or("beta_slow", 1.0)
    if fast < slow:
        raise ValueError(
            f"{op}: rope_scaling['beta_fast']: expected at least beta_slow ({slow}), got {fast}"
        )
    low = max(math.floor(boundary(fast)), 0)
    high = min(math.ceil(boundary(slow)), d_kpe - 1)
    slowed = np.clip((np.arange(d_kpe // 2) - low) / max(high - low, 1e-3), 0, 1)
    mscale, all_dim = number_or("mscale", 0.0), number_or("mscale_all_dim", 0.0)
    if scaling.get("attention_factor") is not None:
        amplitude = number("attention_factor")
    elif mscale and all_dim:
        amplitude = _mscale(factor, mscale) / _mscale(factor, all_dim)
    else:
        amplitude = _mscale(factor, 1.0)
    if not amplitude <= float(np.finfo(np.float32).max):
        raise ValueError(
            f"{op}: rope_scaling: expected a factor on cos and sin that float32 holds, got "
            f"{amplitude}"
        )
    return frequencies * (1 - slowed) + frequencies / factor * slowed, amplitude


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _positive(op: str, name: str, x: float) -> float:
    value = _checks.number(op, name, x)
    if not 0 < value < math.inf:
        raise ValueError(f"{op}: {name}: expected a positive finite number, got {value}")
    return value


def rounded(x: Array, dtype: jnp.dtype) -> Array:
    """Return a float32 array in `dtype`, rounded whatever follows.

    A cast alone is left out by XLA where float32 follows (`xla_allow_excess_precision`).
    """
    if dtype == jnp.float32:
        return x
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(dtype)
    # reduce_precision would make zeros of subnormal float16 values.
    return lax.optimization_barrier(x.astype(dtype))


def as_rank(x: Array, rank: int) -> Array:
    """Return [d] as an array of this rank, whose last dimension is d."""
    return x.reshape(*(1,) * (rank - 1), -1)

"""Checks of what rows go through on their way into the cache, for the ops that write rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import Array

from jax_mla.ops import _checks

MAX_EPS = float(np.finfo(np.float32).max)


def interleaved(op: str, value: bool | None, rope_table: Any) -> bool:
    """Return the argument `rope_interleaved`, which is required where rows are rotated.

    Either value is wrong for some models, and no error would say so.
    """
    if value is not None:
        value = _checks.flag(op, "rope_interleaved", value)
    if value is None and rope_table is not None:
        raise ValueError(
            f"{op}: rope_interleaved: expected True or False with rope_table, got None; True for "
            "the published weights of DeepSeek, Kimi and GLM-5, whose pairs lie side by side, "
            "False for MiniCPM3's"
        )
    if value and rope_table is None:
        raise ValueError(f"{op}: rope_interleaved: expected None without rope_table, got True")
    return bool(value)


def transforms(
    op: str, ckv: Array, kpe: Array | None, norm_weight: Any, rope_table: Any
) -> tuple[Array | None, Array | None]:
    """Check the norm's weight and the table of angles, and return them as JAX arrays.

    Args:
      op: name of the calling op, for messages.
      ckv: the new latents, [..., d_ckv].
      kpe: the new rotary keys, [..., d_kpe], or None.
      norm_weight: as the caller gave it, or None.
      rope_table: as the caller gave it, or None.

    Raises:
      TypeError: wrong dtype, also that of rows that are codes, with which nothing is computed.
      ValueError: wrong shape.
    """
    if norm_weight is not None:
        norm_weight = _checks.array(op, "norm_weight", norm_weight)
    if rope_table is not None:
        rope_table = _checks.array(op, "rope_table", rope_table, ("float32",))
    if norm_weight is not None or rope_table is not None:
        name = "norm_weight" if rope_table is None else "rope_table"
        _checks.dtype(op, "ckv", ckv, _checks.FLOATS, f" with {name}")
    if norm_weight is not None:
        _checks.shape(op, "norm_weight", norm_weight, (ckv.shape[-1],), ", the width of ckv")
        _checks.dtype(op, "norm_weight", norm_weight, _checks.FLOATS)
    if rope_table is not None:
        if kpe is None:
            raise ValueError(
                f"{op}: rope_table: expected None for rows without rotary part, got an array"
            )
        d_kpe = kpe.shape[-1]
        _checks.shape(op, "rope_table", rope_table, (None, d_kpe), ", the width of kpe")
        _checks.dtype(op, "rope_table", rope_table, ("float32",))
        if rope_table.shape[0] == 0 or (isinstance(d_kpe, int) and d_kpe % 2):
            raise ValueError(
                f"{op}: rope_table: expected at least one position and an even width, got shape "
                f"{tuple(rope_table.shape)}"
            )
    return norm_weight, rope_table


def eps(op: str, norm_eps: float) -> float:
    """Return what the norm adds to the mean square."""
    value = _checks.number(op, "norm_eps", norm_eps)
    if not 0 <= value <= MAX_EPS:
        raise ValueError(f"{op}: norm_eps: expected a number in [0, {MAX_EPS:.3g}], got {value}")
    return value

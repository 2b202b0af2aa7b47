"""Checks of single arguments of `decode`, `ragged_paged_attention` and `sparse_attention`."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jax_mla.kv_cache import Shaped
from jax_mla.ops import _checks, _eager

# The kernels multiply the scale by log2(e), and the product must be finite.
MAX_SCALE = float(np.finfo(np.float32).max) * math.log(2)


def query_scale(op: str, q_nope: Shaped, x: Any) -> tuple[float | jax.Array] | None:
    """Return the scale of the queries in a tuple; None if they are not e4m3."""
    is_e4m3 = _checks.dtype_name(q_nope.dtype) == _checks.E4M3
    if x is None and not is_e4m3:
        return None
    if not is_e4m3:
        raise ValueError(f"{op}: q_scale: expected None for queries in {q_nope.dtype}, got a scale")
    if x is None:
        raise ValueError(f"{op}: q_scale: expected a scale for queries in {q_nope.dtype}, got None")
    return (_checks.scale(op, "q_scale", x),)


def dtype_of_call(q_nope: Shaped) -> str:
    """Return the dtype in which a call computes: bfloat16, if its queries are codes."""
    name = _checks.dtype_name(q_nope.dtype)
    return "bfloat16" if name == _checks.E4M3 else name


def as_arrays(operands: Any, num_groups: int = 1) -> Any:
    """Return checked operands as primitives take them: arrays, and no queries in e4m3.

    bfloat16 holds the value of every code exactly.
    """
    operands = _eager.with_scalar_arrays(operands, num_groups)
    dtype = dtype_of_call(operands.q_nope)
    q_pe = None if operands.q_pe is None else operands.q_pe.astype(dtype)
    return operands._replace(q_nope=operands.q_nope.astype(dtype), q_pe=q_pe)


def scale(op: str, sm_scale: float) -> float:
    """Return the factor on the scores as a float that float32 holds."""
    value = _checks.number(op, "sm_scale", sm_scale)
    if not abs(value) <= MAX_SCALE:
        raise ValueError(
            f"{op}: sm_scale: expected a number between -{MAX_SCALE:.3g} and {MAX_SCALE:.3g}, got "
            f"{value}"
        )
    return value


def max_seq_len(op: str, bound: int | None, capacity: Any) -> int:
    """Return the caller's bound of the lengths; 0 if there is none.

    Args:
      op: name of the calling op, for messages.
      bound: the argument max_seq_len.
      capacity: tokens for which the page table has places. A bound that is not below it has no
        effect, and must not give another program.
    """
    if bound is None:
        return 0
    bound = _checks.integer(op, "max_seq_len", bound, expected="None or an int")
    if bound < 1:
        raise ValueError(f"{op}: max_seq_len: expected None or an int of at least 1, got {bound}")
    if bound >= (capacity if isinstance(capacity, int) else _checks.MAX_TOKENS_PER_SEQ):
        return 0
    return bound


def sliding_window(op: str, window: int | None, bound: Any) -> int:
    """Return how many tokens a query sees at most; 0 if nothing limits that.

    Args:
      op: name of the calling op, for messages.
      window: the argument sliding_window.
      bound: the most tokens that a sequence may have. A window that is not below it hides nothing,
        and must not make another program.
    """
    if window is None:
        return 0
    window = _checks.integer(op, "sliding_window", window, expected="None or an int")
    if window < 1:
        raise ValueError(
            f"{op}: sliding_window: expected None or an int of at least 1, got {window}"
        )
    if window >= (bound if isinstance(bound, int) else _checks.MAX_TOKENS_PER_SEQ):
        return 0
    return window


def soft_cap(op: str, cap: float | None) -> float:
    """Return what limits the scores, as a float that float32 holds; 0 if nothing does."""
    if cap is None:
        return 0.0
    value = _checks.number(op, "soft_cap", cap)
    if not 2.0**-60 <= value <= 2.0**60:
        raise ValueError(
            f"{op}: soft_cap: expected None or a number from 2^-60 to 2^60, got {value}"
        )
    return float(np.float32(value))


def splits(op: str, num_splits: int | None) -> int:
    """Return the largest number of parts of a sequence; 0 for None."""
    if num_splits is None:
        return 0
    number = _checks.integer(op, "num_splits", num_splits)
    if not 1 <= number < 2**31:
        raise ValueError(f"{op}: num_splits: expected None or an int in [1, 2^31), got {number}")
    return number

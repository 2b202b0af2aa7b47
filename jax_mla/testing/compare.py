"""Decides whether a result is right; see docs/numerics.md."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from jax_mla.kv_cache import pool_sizes
from jax_mla.testing.inputs import DecodeInputs

# The error that is always allowed, relative to the largest result: one unit in its last place.
ATOL = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 2e-5}
# The same for the log-sum-exp, times 1 + |lse| / 20. Every backend sums it in float32. A missing
# block of 64 among 8,000 tokens changes it by 8e-3.
ATOL_LSE = {"bfloat16": 1e-4, "float16": 1e-4, "float32": 2e-5}
MAX_COSINE_DISTANCE = {"bfloat16": 2e-5, "float16": 1e-6, "float32": 1e-9}


def decode_in_dtype(inputs: DecodeInputs, **mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate the definition, rounding every intermediate result to the dtype of the call.

    The error of this against `decode_exactly` is the yardstick for the error of a backend.

    Args:
      inputs: arguments of the call.
      **mask: `causal`, `sliding_window` and `soft_cap` of `jax_mla.decode`.

    Returns:
      out and lse in float32.
    """
    return _decode(inputs, np.dtype(np.float32), inputs.dtype, **mask)


def decode_exactly(inputs: DecodeInputs, **mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """Evaluate the definition in float64, without JAX: nothing is compiled.

    Args:
      inputs: arguments of the call, whose page ids are all in the pool.
      **mask: `causal`, `sliding_window` and `soft_cap` of `jax_mla.decode`.

    Returns:
      out and lse in float32.
    """
    return _decode(inputs, np.dtype(np.float64), np.dtype(np.float64), **mask)


def _decode(
    inputs: DecodeInputs,
    dtype: np.dtype,
    rounded: np.dtype,
    *,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute in `dtype`, and round every intermediate result to `rounded`."""
    inputs = inputs.plain()
    pools = inputs.kv_pages if isinstance(inputs.kv_pages, tuple) else (inputs.kv_pages,)
    batch, q_len, num_heads, d_ckv = inputs.q_nope.shape
    page_size = pool_sizes(pools[0], inputs.layer is not None).page_size
    d_kpe = inputs.q_pe.shape[-1]
    widths = [d_ckv + d_kpe] if len(pools) == 1 else [d_ckv, d_kpe]
    layers = [p if inputs.layer is None else p[inputs.layer] for p in pools]
    out = np.zeros(inputs.q_nope.shape, np.float32)
    lse = np.full((batch, q_len, num_heads), -np.inf, np.float32)
    lens = inputs.seq_lens
    if inputs.max_seq_len is not None:
        lens = np.minimum(lens, min(inputs.max_seq_len, np.iinfo(np.int32).max))

    @functools.lru_cache(maxsize=2)  # the tokens of a step that are one sequence have the same ids
    def rows_of(ids: bytes) -> np.ndarray:
        pages = [layer[np.frombuffer(ids, np.int32)] for layer in layers]
        rows = [
            page.reshape(-1, page.shape[-1])[:, :width]
            for page, width in zip(pages, widths, strict=True)
        ]
        return np.concatenate(rows, axis=-1).astype(dtype)

    def round_off(x: np.ndarray) -> np.ndarray:
        return x.astype(rounded).astype(dtype)

    def seen_from(place: int) -> int:
        return 0 if sliding_window is None else max(place - sliding_window + 1, 0)

    for b, length in enumerate(lens):
        skipped = seen_from(length - q_len) // page_size
        ids = np.ascontiguousarray(
            inputs.page_table[b, skipped : -(-length // page_size)], np.int32
        )
        row = rows_of(ids.tobytes())
        for i in range(q_len):
            place = length - q_len + i
            end = place + 1 if causal else length
            if end <= 0:
                continue
            keys = row[seen_from(place) - skipped * page_size : end - skipped * page_size]
            q = np.concatenate([inputs.q_nope[b, i], inputs.q_pe[b, i]], -1).astype(dtype)
            s = round_off(round_off(q @ keys.T) * dtype.type(inputs.sm_scale))
            if soft_cap is not None:
                cap = dtype.type(soft_cap)
                s = round_off(cap * round_off(np.tanh(s / cap)))
            peak = s.max(-1, keepdims=True)
            p = round_off(np.exp(s - peak))
            total = p.sum(-1, keepdims=True)
            out[b, i] = round_off(round_off(p / total) @ keys[:, :d_ckv])
            lse[b, i] = (peak + np.log(total))[:, 0]
    return out, lse


def assert_close(
    out: ArrayLike,
    lse: ArrayLike | None,
    expected_out: ArrayLike,
    expected_lse: ArrayLike,
    *,
    dtype: str,
    yardstick: ArrayLike | None = None,
    lse_yardstick: ArrayLike | None = None,
) -> None:
    """Raise AssertionError unless a decode result is close enough to the reference.

    Args:
      out: [..., d_ckv], the result.
      lse: [...], its log-sum-exp, or None.
      expected_out: [..., d_ckv] float32, from the reference.
      expected_lse: [...] float32, from the reference.
      dtype: name of the dtype of the inputs, which sets the absolute tolerance.
      yardstick: `out` of `decode_in_dtype`; twice its largest error is added to the tolerance.
      lse_yardstick: its `lse`, only where scores are summed with 13 bits (docs/numerics.md); the
        same.
    """
    out = np.asarray(out, np.float32)
    expected_out, expected_lse = np.asarray(expected_out), np.asarray(expected_lse)
    empty = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected_out), err_msg="NaNs of out")
    np.testing.assert_array_equal(out[empty], 0, err_msg="rows without a key")
    allowed = ATOL[dtype] * max(1e-3, float(np.nanmax(np.abs(expected_out), initial=0)))
    if yardstick is not None:
        allowed += 2 * float(np.nanmax(np.abs(np.asarray(yardstick) - expected_out), initial=0))
    error = float(np.nanmax(np.abs(out - expected_out), initial=0))
    assert error <= allowed, f"out: largest error {error:.3g}, allowed {allowed:.3g}"
    a, b = np.nan_to_num(out).ravel(), np.nan_to_num(expected_out).ravel()
    a, b = a.astype(np.float64), b.astype(np.float64)
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    distance = 1 - float(a @ b) / norm if norm else 0.0
    limit = MAX_COSINE_DISTANCE[dtype]
    assert distance <= limit, f"out: cosine distance {distance:.3g}, allowed {limit:.3g}"
    if lse is None:
        return
    lse = np.asarray(lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty, err_msg="-inf of lse")
    np.testing.assert_array_equal(np.isnan(lse), np.isnan(expected_lse), err_msg="NaNs of lse")
    finite = np.isfinite(expected_lse)
    limit = ATOL_LSE[dtype] * (1 + np.abs(expected_lse[finite]) / 20)
    if lse_yardstick is not None:
        off = np.abs(np.asarray(lse_yardstick)[finite] - expected_lse[finite])
        limit += 2 * float(np.nanmax(off, initial=0))
    error = float(np.max(np.abs(lse[finite] - expected_lse[finite]) / limit, initial=0))
    assert error <= 1, f"lse: largest error {error:.3g} times what is allowed"

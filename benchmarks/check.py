"""Checks results before anything is timed, with the comparison that the tests use."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from workload import Workload

from jax_mla.testing import compare, inputs

# A check evaluates at most this many heads and tokens of a sequence, spread over all of them, and
# about this many scores beyond those of the first token. The host takes well under a second.
_MOST_HEADS = 16
_MOST_TOKENS = 4
_MOST_SCORES = 2**19
# Bounds of |out - expected| / |expected| of a token, which is 2e-3 with 16-bit weights and results.
# Scores of codes by codes are summed with 13 bits: up to 7e-3 was seen (docs/numerics.md).
_MAX_RELATIVE_ERROR, _MAX_CODES_ERROR = 6e-3, 1e-2


@dataclasses.dataclass(frozen=True)
class Check:
    """A few tokens of a few sequences of one cache, evaluated on the host in float32.

    Attributes:
      cache: Index of the checked cache. It is the last one, so that a wrong layer shows.
      tokens: [n] indices into the tokens of all sequences, end to end. They are of the longest,
        the shortest, the middle and the last sequence.
      heads: [m] indices of the heads that are compared.
      expected: [n, 1, m, d_ckv] float32. Each token is evaluated as a sequence that ends with it.
      yardstick: The same formula evaluated in the dtype of the operands.
      max_error: The bound of `relative_error`.
    """

    cache: int
    tokens: np.ndarray
    heads: np.ndarray
    expected: np.ndarray
    expected_lse: np.ndarray
    yardstick: np.ndarray
    dtype: str
    max_error: float = _MAX_RELATIVE_ERROR

    @classmethod
    def of(cls, work: Workload) -> "Check":
        """Evaluate the definition for a sample of the workload."""
        case = work.case
        lens, begins = case.seq_lens, case.cu_q_lens
        sample = np.unique(
            [int(lens.argmax()), int(lens.argmin()), case.batch // 2, case.batch - 1]
        )
        row_and_token = [
            (row, token)
            for row, b in enumerate(sample)
            for token in np.unique(
                np.linspace(begins[b], begins[b + 1] - 1, _MOST_TOKENS).astype(int)
            )
        ]
        rows, tokens = np.array(row_and_token).T
        # How many tokens of its sequence each sees: all but those after it.
        seen = lens[sample[rows]] - (begins[sample[rows] + 1] - 1 - tokens)
        count = min(case.num_heads, _MOST_HEADS)
        heads = np.linspace(0, case.num_heads - 1, count).astype(int)
        scores = np.cumsum(seen.astype(np.int64) * count)
        kept = max(1, int(np.searchsorted(scores, _MOST_SCORES, side="right")))
        rows, tokens, seen = rows[:kept], tokens[:kept], seen[:kept]
        cache = work.num_caches - 1
        pool, table = work.host_cache(cache, sample)
        in_dtype = inputs.DecodeInputs(
            q_nope=_picked(work.q_nope, tokens, heads),
            q_pe=_picked(work.q_pe, tokens, heads),
            kv_pages=pool,
            page_table=table[rows],
            seq_lens=seen,
            sm_scale=work.sm_scale,
            layer=None,
        )
        # The yardstick's formula in float32 is the definition.
        in_f32 = dataclasses.replace(in_dtype, q_nope=in_dtype.q_nope.astype(np.float32))
        expected, lse = compare.decode_in_dtype(in_f32)
        yardstick, _ = compare.decode_in_dtype(in_dtype)
        max_error = _MAX_RELATIVE_ERROR if work.kv_format is None else _MAX_CODES_ERROR
        return cls(cache, tokens, heads, expected, lse, yardstick, case.dtype, max_error)

    def call(self, operands: tuple[Any, ...], call: Callable[..., Any]) -> Any:
        """Run one call over the checked cache; returns what it returns."""
        return jax.jit(call, static_argnums=len(operands))(*operands, self.cache)

    def relative_error(self, out: jax.Array | np.ndarray, most: float | None = None) -> float:
        """Compare a whole output with the sample.

        Args:
          out: Like q_nope, in any float dtype.
          most: The largest error of an implementation that rounds its weights to 8 bits. Nothing
            else is compared then. Without it, the bounds are those of the tests.

        Returns:
          |out - expected| / |expected|, Euclidean, over the sample.

        Raises:
          AssertionError: It is further off than the tests allow, or not finite somewhere.
        """
        is_finite = (jnp if isinstance(out, jax.Array) else np).isfinite(out)
        assert is_finite.all(), "out: not finite"
        mine = _picked(out, self.tokens, self.heads).astype(np.float32)
        if most is None:
            compare.assert_close(
                mine,
                None,
                self.expected,
                self.expected_lse,
                dtype=self.dtype,
                yardstick=self.yardstick,
            )
            most = self.max_error
        norms = np.linalg.norm([mine - self.expected, self.expected], axis=(-2, -1))
        norms = norms[:, norms[1] > 0]  # a token without a key has 0, as `assert_close` has checked
        worst = float((norms[0] / norms[1]).max(initial=0))  # of a token
        assert worst <= most, f"out: relative error {worst:.2g}"
        return float(np.linalg.norm(norms[0]) / max(np.linalg.norm(norms[1]), 1e-30))


def _picked(rows: jax.Array | np.ndarray, tokens: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Return [tokens, 1, heads, d] of [..., num_heads, d], on the host."""
    flat = rows.reshape(math.prod(rows.shape[:-2]), *rows.shape[-2:])  # d may be 0
    return np.asarray(flat[tokens])[:, None, heads]

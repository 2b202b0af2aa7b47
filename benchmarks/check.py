"""Checks results before anything is timed, with the comparison that the tests use."""

import dataclasses

import jax
import numpy as np
from contenders import DecodeFn
from workload import Workload

from jax_mla.testing import compare, inputs

# A check evaluates at most this many heads, spread over all of them, and about this many scores
# beyond those of the first sequence. On the host that takes well under a second.
_MOST_HEADS = 16
_MOST_SCORES = 2**18
# Bound of |out - expected| / |expected|, which is 2e-3 with 16-bit weights and results.
_MAX_RELATIVE_ERROR = 6e-3


@dataclasses.dataclass(frozen=True)
class Check:
    """A few sequences of one cache, evaluated on the host in float32.

    Attributes:
      cache: Index of the checked cache. It is the last one, so that a wrong layer shows.
      sequences: [n] indices into the batch: the longest, the shortest and the last.
      heads: [m] indices of the heads that are compared.
      expected: [n, q_len, m, d_ckv] float32.
      yardstick: The same formula evaluated in the dtype of the operands.
    """

    cache: int
    sequences: np.ndarray
    heads: np.ndarray
    expected: np.ndarray
    expected_lse: np.ndarray
    yardstick: np.ndarray
    dtype: str

    @classmethod
    def of(cls, work: Workload) -> "Check":
        """Evaluate the definition for a sample of the workload."""
        case = work.case
        lens = case.seq_lens
        sample = np.unique([int(lens.argmax()), int(lens.argmin()), case.batch - 1])
        count = min(case.num_heads, _MOST_HEADS)
        heads = np.linspace(0, case.num_heads - 1, count).astype(int)
        scores = np.cumsum(lens[sample].astype(np.int64) * len(heads) * case.q_len)
        sample = sample[: max(1, int(np.searchsorted(scores, _MOST_SCORES, side="right")))]
        cache = work.num_caches - 1
        pool, table = work.host_cache(cache, sample)
        in_dtype = inputs.DecodeInputs(
            q_nope=np.asarray(work.q_nope)[sample][:, :, heads],
            q_pe=np.asarray(work.q_pe)[sample][:, :, heads],
            kv_pages=pool,
            page_table=table,
            seq_lens=lens[sample],
            sm_scale=work.sm_scale,
            layer=None,
        )
        # The yardstick's formula in float32 is the definition.
        in_f32 = dataclasses.replace(in_dtype, q_nope=in_dtype.q_nope.astype(np.float32))
        expected, lse = compare.decode_in_dtype(in_f32)
        yardstick, _ = compare.decode_in_dtype(in_dtype)
        return cls(cache, sample, heads, expected, lse, yardstick, case.dtype)

    def call(self, work: Workload, decode: DecodeFn) -> np.ndarray:
        """Run one call over the checked cache; returns its whole output in float32."""
        call = jax.jit(decode, static_argnums=5)
        out = call(*work.operands, self.cache)
        return np.asarray(out).astype(np.float32)

    def relative_error(self, out: np.ndarray) -> float:
        """Compare a whole output with the sample.

        Args:
          out: [batch, q_len, num_heads, d_ckv] float32.

        Returns:
          |out - expected| / |expected|, Euclidean.

        Raises:
          AssertionError: It is further off than the tests allow, or not finite somewhere.
        """
        assert np.isfinite(out).all(), "out: not finite"
        mine = out[self.sequences][:, :, self.heads]
        compare.assert_close(
            mine,
            None,
            self.expected,
            self.expected_lse,
            dtype=self.dtype,
            yardstick=self.yardstick,
        )
        error = float(np.linalg.norm(mine - self.expected) / np.linalg.norm(self.expected))
        assert error <= _MAX_RELATIVE_ERROR, f"out: relative error {error:.2g}"
        return error

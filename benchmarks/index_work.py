"""The data of a timed call of `index_topk`: rotating caches of FP8 keys, queries and weights.

Values are random normal and pages are randomly permuted, as in workload.py.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import workload
from index_grid import DIM, PAGE_SIZE, IndexCase

import jax_mla

# As in workload.py: keys repeat with this period, a prime.
_TILE_TOKENS = 104_729
_MOST_CACHES = 96

# A check compares the lists of so many queries, of the first, the middle and the last sequence.
_MOST_QUERIES = 3
# Bound of a dot product's error over the lengths of its vectors. The tensor cores of Hopper keep 13
# bits behind the point of the largest term of a product of codes.
_DOT_ERROR = 5e-4


def num_caches(case: IndexCase, min_bytes: float) -> int:
    """Return how many caches to rotate over.

    They hold `min_bytes` of keys. A prompt moves more for its queries and lists than L2 holds, and
    reads its keys many times: two are enough.
    """
    if case.is_prefill:
        return 2
    return min(_MOST_CACHES, max(2, math.ceil(min_bytes / max(case.key_bytes, 1))))


@dataclasses.dataclass(frozen=True)
class IndexWorkload:
    """Operands of one call.

    Attributes:
      q: [tokens, heads, 128] float8_e4m3fn.
      weights: [tokens, heads] float32, multiplied by the scales of q.
      pools: [num_caches, num_pages, 64, 132] uint8.
      page_table: [batch, pages] int32, one for all caches.
      seq_lens: [batch] int32.
      tile: [tile_pages, 64, 128] float32, the values of the keys; page p of cache c holds
        `tile[(c * num_pages + p) % tile_pages]`.
    """

    case: IndexCase
    q: jax.Array
    weights: jax.Array
    pools: jax.Array
    page_table: jax.Array
    seq_lens: jax.Array
    tile: np.ndarray
    kv_format: str | None = None  # keys are in FP8 always

    @property
    def num_caches(self) -> int:
        """Caches to rotate over."""
        return self.pools.shape[0]

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        """The arguments of a call before its layer."""
        return self.q, self.weights, self.pools, self.page_table, self.seq_lens


@jax.jit
def pages_of(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """Return pages of keys in FP8, of [pages, page_size, d] codes and [pages, page_size] scales."""
    parts = [
        jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(len(codes), -1) for x in (codes, scales)
    ]
    return jnp.concatenate(parts, axis=1).reshape(len(codes), codes.shape[1], -1)


def make(case: IndexCase, caches: int) -> IndexWorkload:
    """Draw the operands of a call."""
    keys = jax.random.split(jax.random.key(3), 3)
    total = caches * case.num_pages
    tile_pages = max(1, min(_TILE_TOKENS // PAGE_SIZE, total))
    drawn = workload.random_normal(keys[0], (tile_pages, PAGE_SIZE, DIM), "bfloat16")
    encode = jax.jit(jax_mla.reference.encode_index_keys)
    key_codes, key_scales = encode(drawn)
    pages = pages_of(key_codes, key_scales)
    pools = pages[jnp.arange(total).reshape(caches, -1) % tile_pages]
    rows = (case.num_tokens, case.num_heads)
    q = workload.random_normal(keys[1], (*rows, DIM), "bfloat16")
    codes, scales = encode(q)
    factor = case.num_heads**-0.5 * DIM**-0.5
    weights = workload.random_normal(keys[2], rows, "float32", factor) * scales
    order = np.random.default_rng(0).permutation(case.num_pages).astype(np.int32)
    return IndexWorkload(
        case=case,
        q=codes,
        weights=weights,
        pools=pools,
        page_table=jnp.asarray(order.reshape(case.batch, -1)),
        seq_lens=jnp.full((case.batch,), case.seq, jnp.int32),
        # On the host: in one program with `encode`, XLA for GPUs would leave out the codes.
        tile=np.asarray(key_codes).astype(np.float32) * np.asarray(key_scales)[..., None],
    )


@dataclasses.dataclass(frozen=True)
class Check:
    """Scores of a few queries over one cache, evaluated on the host in float32.

    Attributes:
      cache: Which cache: the last one, so that a wrong layer shows.
      queries: Indices of the queries; each sees all tokens of its sequence.
      scores: [len(queries), seq].
      errors: How far a score may be off.
    """

    case: IndexCase
    cache: int
    queries: np.ndarray
    scores: np.ndarray
    errors: np.ndarray
    table: np.ndarray

    @classmethod
    def of(cls, work: IndexWorkload) -> "Check":
        """Evaluate the definition for the last queries of some sequences."""
        case, cache = work.case, work.num_caches - 1
        sequences = np.unique([0, case.batch // 2, case.batch - 1])[:_MOST_QUERIES]
        table = np.asarray(work.page_table)[sequences]
        queries = sequences * case.q_len + case.q_len - 1
        picked = jnp.asarray(queries)
        q = np.asarray(work.q[picked]).astype(np.float32)
        weights = np.asarray(work.weights[picked])
        scores, errors = [], []
        for pages, heads, factors in zip(table, q, weights, strict=True):
            picked_pages = work.tile[(cache * case.num_pages + pages) % len(work.tile)]
            keys = picked_pages.reshape(-1, DIM)[: case.seq]
            scores.append(np.maximum(keys @ heads.T, 0) @ factors)
            lengths = np.abs(factors) @ np.linalg.norm(heads, axis=1)
            errors.append(_DOT_ERROR * lengths * np.linalg.norm(keys, axis=1))
        return cls(case, cache, queries, np.array(scores), np.array(errors), table)

    def other_entries(self, slots: jax.Array, lens: jax.Array) -> float:
        """Compare lists with the definition.

        Args:
          slots: [tokens, k].
          lens: [tokens].

        Returns:
          Which part of the entries float32 would not have chosen. Their scores are within rounding
          of the least one that it chooses.

        Raises:
          AssertionError: An entry is wrong by more than that.
        """
        case, others = self.case, 0
        count = min(case.topk, case.seq)
        expected_lens = np.minimum(np.tile(case.visible, case.batch), case.topk)
        np.testing.assert_array_equal(np.asarray(lens), expected_lens, err_msg="lens")
        rows = np.asarray(slots[jnp.asarray(self.queries)])
        for row, pages, scores, errors in zip(
            rows, self.table, self.scores, self.errors, strict=True
        ):
            place_of = np.full(case.num_pages, -1)
            place_of[pages] = np.arange(len(pages))
            entries = row[:count]
            positions = place_of[entries // PAGE_SIZE] * PAGE_SIZE + entries % PAGE_SIZE
            assert (place_of[entries // PAGE_SIZE] >= 0).all(), "slots: of another sequence"
            assert (np.diff(positions) > 0).all(), "slots: not ascending"
            assert (row[count:] == -1).all(), "slots: expected -1 behind the end"
            is_chosen = np.zeros(case.seq, bool)
            is_chosen[positions] = True
            least = np.partition(scores, case.seq - count)[case.seq - count]
            above = scores - errors > least + errors
            below = scores + errors < least - errors
            assert is_chosen[above].all(), "slots: one of the largest scores is missing"
            assert not is_chosen[below].any(), "slots: a score below the k largest was chosen"
            others += int((scores[positions] < least).sum())
        return others / (count * len(rows))

    def relative_error(self, scores: np.ndarray) -> float:
        """Compare [len(queries), seq] scores of another implementation.

        Raises:
          AssertionError: A score is off by more than rounding.
        """
        difference = np.abs(scores - self.scores)
        assert (difference <= self.errors + 1e-30).all(), "scores: off by more than rounding"
        return float(np.linalg.norm(difference) / np.linalg.norm(self.scores))

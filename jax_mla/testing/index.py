"""Cases, random inputs and an oracle in numpy of `index_topk`.

Values are small integers, so that every order of a sum gives the same float32: scores, ties and the
chosen tokens are exact. What must not be read holds NaN or wild page ids.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_mla.testing.inputs import WILD_IDS

E4M3 = ml_dtypes.float8_e4m3fn
FP8_BYTES = 132
POISON = 0xFF  # a NaN in every format


@dataclasses.dataclass(frozen=True)
class IndexInputs:
    """Arguments of one call, as numpy arrays, and the keys that the pool holds.

    Attributes:
      q: [tokens, index_heads, d].
      weights: [tokens, index_heads] float32.
      index_pages: the pool.
      page_table: [seqs, max_pages_per_seq] int32.
      seq_lens: [seqs] int32.
      cu_q_lens: [seqs + 1] int32, or None.
      k: how many are chosen.
      layer: layer of a stacked pool, or None.
      keys: [num_pages, page_size, d] float32, those of the layer, without their scales.
      scales: [num_pages, page_size] float32.
    """

    q: np.ndarray
    weights: np.ndarray
    index_pages: np.ndarray
    page_table: np.ndarray
    seq_lens: np.ndarray
    cu_q_lens: np.ndarray | None
    k: int
    layer: int | None
    keys: np.ndarray
    scales: np.ndarray

    def args(self) -> list[Any]:
        """Return the positional arguments of the op, as JAX arrays; without cu_q_lens if None."""
        given = [self.q, self.weights, self.index_pages, self.page_table, self.seq_lens]
        bounds = [] if self.cu_q_lens is None else [self.cu_q_lens]
        return [jnp.asarray(x) for x in (*given, *bounds)]

    def kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of the op."""
        return {"k": self.k} if self.layer is None else {"k": self.k, "layer": self.layer}


@dataclasses.dataclass(frozen=True)
class IndexCase:
    """One call.

    Attributes:
      name: name of the case, for test ids.
      seq_lens: tokens of the sequences.
      q_lens: new tokens of each; an int for a uniform call.
      k: how many are chosen.
      num_heads: index heads.
      d: width of a key.
      page_size: rows of a page.
      dtype: dtype of the queries, and of the keys unless they are in FP8.
      is_fp8: whether the keys are codes and scales.
      num_layers: of a stacked pool, or None.
      num_padding: tokens after those of the sequences, in a ragged call.
      num_wild: pages of each sequence, within its length, whose ids are wild.
      span: keys and queries are integers from -span to span.
      sign: what keys are multiplied by; with 0 they are all equal, with -1 no score is above 0.
      why: purpose of the case, if the name does not say it.
    """

    name: str
    seq_lens: tuple[int, ...] = (40, 3, 0, 17)
    q_lens: int | tuple[int, ...] = 1
    k: int = 8
    num_heads: int = 5
    d: int = 128
    page_size: int = 8
    dtype: str = "bfloat16"
    is_fp8: bool = False
    num_layers: int | None = None
    num_padding: int = 0
    num_wild: int = 0
    span: int = 2
    sign: int = 1
    why: str = ""

    def inputs(self, seed: int = 0) -> IndexInputs:
        """Return the arrays of the case. They are shared, so do not write to them."""
        return _inputs(self, seed)


def as_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return an array in a dtype that numpy alone may not know."""
    return x.astype(getattr(ml_dtypes, dtype, dtype))


def fp8_pages(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return pages in FP8, made from DeepGEMM's description and not from the package.

    Args:
      codes: [..., page_size, 128] float8_e4m3fn.
      scales: [..., page_size] float32.

    Returns:
      uint8 [..., page_size, 132]: a page is the codes of all its keys, then their scales.
    """
    front, page_size = scales.shape[:-1], scales.shape[-1]
    page = np.concatenate(
        [
            codes.view(np.uint8).reshape(*front, page_size * 128),
            np.ascontiguousarray(scales, np.float32).view(np.uint8),
        ],
        axis=-1,
    )
    return page.reshape(*front, page_size, FP8_BYTES)


@functools.lru_cache(maxsize=4)
def _inputs(case: IndexCase, seed: int) -> IndexInputs:
    rng = np.random.default_rng(seed)
    batch, page_size = len(case.seq_lens), case.page_size
    is_uniform = isinstance(case.q_lens, int)
    q_lens = [case.q_lens] * batch if isinstance(case.q_lens, int) else list(case.q_lens)
    num_tokens = sum(q_lens) + case.num_padding

    def integers(*shape: int) -> np.ndarray:
        return rng.integers(-case.span, case.span + 1, shape).astype(np.float32)

    num_pages = [-(-length // page_size) for length in case.seq_lens]
    total, widest = sum(num_pages) + 3, max(num_pages) + 2
    keys, scales = integers(total, page_size, case.d), np.ones((total, page_size), np.float32)
    keys = -np.abs(keys) if case.sign < 0 else keys * case.sign
    if case.is_fp8:
        scales = np.exp2(rng.integers(-2, 3, scales.shape)).astype(np.float32)
    table = rng.choice(WILD_IDS, (batch, widest)).astype(np.int32)
    ids = iter(rng.permutation(total))
    is_live = np.zeros((total, page_size), bool)
    for b, count in enumerate(num_pages):
        for place in range(count):
            page = next(ids)
            table[b, place] = page
            is_live[page, : case.seq_lens[b] - place * page_size] = True
        table[b, rng.permutation(count)[: case.num_wild]] = rng.choice(WILD_IDS)
    pool = fp8_pages(keys.astype(E4M3), scales) if case.is_fp8 else as_dtype(keys, case.dtype)
    pool = _poisoned(pool, is_live, case)
    if case.num_layers is not None:
        other = np.full_like(pool.view(np.uint8), POISON).view(pool.dtype)
        pool = np.stack([other] * (case.num_layers - 1) + [pool])
    q = integers(num_tokens, case.num_heads, case.d)
    q = np.abs(q) if case.sign < 0 else q
    return IndexInputs(
        q=as_dtype(q, case.dtype),
        weights=integers(num_tokens, case.num_heads),
        index_pages=pool,
        page_table=table,
        seq_lens=np.array(case.seq_lens, np.int32),
        cu_q_lens=None if is_uniform else np.cumsum([0, *q_lens]).astype(np.int32),
        k=case.k,
        layer=None if case.num_layers is None else case.num_layers - 1,
        keys=keys,
        scales=scales,
    )


def _poisoned(pool: np.ndarray, is_live: np.ndarray, case: IndexCase) -> np.ndarray:
    """Return the pool with NaN in every row that no sequence has."""
    bytes_ = pool.view(np.uint8).copy()
    if not case.is_fp8:
        rows = bytes_.reshape(*is_live.shape, -1)
        rows[~is_live] = POISON
        return rows.reshape(bytes_.shape).view(pool.dtype)
    page = bytes_.reshape(len(is_live), -1)
    codes, scales = np.split(page, [case.page_size * 128], axis=1)
    codes.reshape(*is_live.shape, 128)[~is_live] = POISON
    scales.reshape(*is_live.shape, 4)[~is_live] = POISON
    return page.reshape(pool.shape)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What the oracle chooses for one query.

    Attributes:
      positions: ascending.
      slots: of these.
      scores: of these.
    """

    positions: list[int]
    slots: list[int]
    scores: list[float]


def oracle(inputs: IndexInputs, num_seqs: int | None = None) -> list[Chosen]:
    """Choose in numpy, token by token, for legal lengths and bounds."""
    num_pages, page_size = inputs.scales.shape
    batch, num_tokens = len(inputs.seq_lens), len(inputs.q)
    bounds = inputs.cu_q_lens
    if bounds is None:
        bounds = np.arange(batch + 1) * (num_tokens // batch)
    found = [Chosen([], [], [])] * num_tokens
    for b in range(batch if num_seqs is None else num_seqs):
        for t in range(bounds[b], bounds[b + 1]):
            place = int(inputs.seq_lens[b]) - (int(bounds[b + 1]) - t)
            positions = np.arange(max(place + 1, 0))
            pages = inputs.page_table[b, positions // page_size]
            positions = positions[(pages >= 0) & (pages < num_pages)]
            pages = inputs.page_table[b, positions // page_size]
            rows = positions % page_size
            keys, scales = inputs.keys[pages, rows], inputs.scales[pages, rows]
            dots = np.maximum(keys @ inputs.q[t].astype(np.float32).T, 0)
            scores = (dots * inputs.weights[t]).sum(-1) * scales + 0.0  # no -0
            best = np.sort(np.lexsort((positions, -scores))[: inputs.k])
            slots = inputs.page_table[b, positions[best] // page_size] * page_size + rows[best]
            shown = scores[best] if place >= inputs.k else np.zeros(len(best))
            found[t] = Chosen(positions[best].tolist(), slots.tolist(), shown.tolist())
    return found


def check_lists(got: Sequence[Any], want: list[Chosen], k: int, *, positions: bool = False) -> None:
    """Compare lists and lengths, the first two results, with the oracle's: every entry, then -1."""
    lists, lens = got[:2]
    want_lens = np.array([len(x.slots) for x in want])
    want_lists = np.full((len(want), k), -1)
    for row, x in zip(want_lists, want, strict=True):
        row[: len(x.slots)] = x.positions if positions else x.slots
    np.testing.assert_array_equal(np.asarray(lens).reshape(-1), want_lens)
    np.testing.assert_array_equal(np.asarray(lists).reshape(len(want), k), want_lists)


def check_scores(scores: Any, want: list[Chosen], k: int) -> None:
    """Compare scores with the oracle's, and the rest with minus infinity."""
    expected = np.full((len(want), k), -np.inf, np.float32)
    for row, x in zip(expected, want, strict=True):
        row[: len(x.scores)] = x.scores
    np.testing.assert_array_equal(np.asarray(scores).reshape(len(want), k), expected)


_TINY = functools.partial(IndexCase, d=32, dtype="float32")

INDEX_CASES: tuple[IndexCase, ...] = (
    IndexCase("decode"),
    IndexCase("uniform_chunks", (40, 3, 9, 17), q_lens=3, num_wild=1),
    IndexCase(
        "mixed", (40, 3, 0, 17, 30), q_lens=(1, 3, 0, 1, 9), num_padding=4, num_layers=2,
        why="a chunk of a prompt, whole prompts, sequences that decode, padding",
    ),
    IndexCase("heads_64", (700, 300), k=96, num_heads=64, page_size=64),
    IndexCase("heads_1", num_heads=1),
    IndexCase("page_1", page_size=1, num_wild=3),
    IndexCase("page_48", (200, 49), k=30, page_size=48),
    IndexCase("zeros", (3000, 2100), k=2048, page_size=64, sign=-1, why="all scores are 0 by ReLU"),
    IndexCase("equal", (3000, 9), k=512, page_size=64, sign=0),
    IndexCase("ties", (5000,), k=2048, page_size=64, span=1, num_heads=2, why="thousands of ties"),
    IndexCase("top_2176", (4500, 2176), k=2176, page_size=64, num_heads=16),
    IndexCase("at_most_k", (8, 7, 1, 0), k=8, num_wild=1),
    IndexCase("k_1", k=1),
    IndexCase("f16", dtype="float16"),
    _TINY("tiny", q_lens=(2, 0, 0, 5)),
    IndexCase("fp8", (40, 3, 0, 17), dtype="float8_e4m3fn", is_fp8=True),
    IndexCase("fp8_bf16_queries", (300, 90), k=64, page_size=64, is_fp8=True, num_layers=3),
    IndexCase(
        "fp8_mixed", (140, 3, 70), q_lens=(1, 3, 60), k=32, page_size=16, num_padding=1,
        dtype="float8_e4m3fn", is_fp8=True, num_heads=32, num_wild=1,
    ),
    IndexCase(
        "fp8_ties", (4000,), k=2048, page_size=64, span=1, num_heads=2, is_fp8=True,
        dtype="float8_e4m3fn",
    ),
)  # fmt: skip

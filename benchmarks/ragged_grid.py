"""Which engine steps bench_ragged.py times. Pure data without JAX, as in grid.py."""

import dataclasses
import functools

import numpy as np
from grid import Case

# (new tokens, tokens in the cache with them) of each sequence
Lengths = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class RaggedCase(Case):
    """One step with new tokens of unequal sequences; `seq` and `q_len` are the largest ones.

    Attributes:
      name: What the step is made of, for the report.
      lengths: New tokens, and tokens in the cache with them, of each sequence.
    """

    name: str = ""
    lengths: Lengths = ()

    @functools.cached_property
    def seq_lens(self) -> np.ndarray:
        """[batch] int32 tokens in the cache, the new ones included."""
        return np.array([length for _, length in self.lengths], np.int32)

    @property
    def q_lens(self) -> np.ndarray:
        """[batch] new tokens of each sequence."""
        return np.array([q_len for q_len, _ in self.lengths])

    @property
    def query_shape(self) -> tuple[int, ...]:
        """Shape of the queries before their last dimension."""
        return self.num_tokens, self.num_heads

    @property
    def num_pairs(self) -> int:
        """Query tokens times tokens that each attends to, which end with itself."""
        return sum(q_len * length - q_len * (q_len - 1) // 2 for q_len, length in self.lengths)

    @property
    def written_bytes(self) -> int:
        """Bytes of the new rows, which are read with the cache and written to it."""
        return self.num_tokens * (self.d_ckv + self.d_kpe) * self.item_bytes

    @property
    def is_uniform(self) -> bool:
        """Whether all sequences have the same number of new tokens."""
        return bool((self.q_lens == self.q_len).all())

    @property
    def sequences(self) -> np.ndarray:
        """[num_tokens] the sequence of each token."""
        return np.repeat(np.arange(self.batch), self.q_lens)

    @property
    def places(self) -> np.ndarray:
        """[num_tokens] the place of each token in its sequence."""
        behind = self.cu_q_lens[self.sequences + 1] - np.arange(self.num_tokens)
        return self.seq_lens[self.sequences] - behind

    @property
    def label(self) -> str:
        """Short name for the reports."""
        return f"{self.name} h{self.num_heads}"


def step(name: str, num_heads: int, lengths: Lengths) -> RaggedCase:
    """Return the case of a step."""
    q_len, seq = (max(column) for column in zip(*lengths, strict=True))
    return RaggedCase(len(lengths), num_heads, seq, q_len, name=name, lengths=lengths)


def mixed(
    num_heads: int,
    num_chunks: int,
    chunk: int,
    cached: int,
    *,
    num_decoding: int = 64,
    seq: int = 4096,
) -> RaggedCase:
    """Sequences with one token each, and chunks of prompts behind `cached` tokens."""
    lengths = num_decoding * ((1, seq),) + num_chunks * ((chunk, cached + chunk),)
    return step(f"{num_decoding}x1@{seq} {num_chunks}x{chunk}@{cached}", num_heads, lengths)


def uniform(num_heads: int, batch: int, q_len: int, seq: int) -> RaggedCase:
    """The same number of new tokens for each sequence."""
    return step(f"b{batch} q{q_len} s{seq}", num_heads, batch * ((q_len, seq),))


def drawn(num_heads: int, batch: int, most: int, *, skewed: bool, seq: int = 4096) -> RaggedCase:
    """From 1 to `most` new tokens; `seq` tokens in all, or log-normal lengths of this median."""
    rng = np.random.default_rng(0)
    q_lens = rng.integers(1, most, batch, endpoint=True)
    factors = rng.lognormal(0.0, 1.0, batch) if skewed else np.ones(batch)
    seq_lens = np.maximum(np.rint(seq * factors).astype(int), q_lens)
    name = f"b{batch} q1-{most} s{'~' * skewed}{seq}"
    return step(name, num_heads, tuple(zip(q_lens.tolist(), seq_lens.tolist(), strict=True)))


def full_grid() -> list[RaggedCase]:
    """All steps, by kind: mixed, drawn, chunks, one token a sequence, prompts from nothing."""
    heads, few = (16, 64, 128), (16, 128)
    chunks = [
        (n, size, cached) for n in (1, 4) for size in (64, 256, 512) for cached in (0, 2048, 16384)
    ]
    prompts = [(1, 2048), (4, 700), (1, 8192)]
    return [
        *(mixed(h, *chunk) for h in heads for chunk in chunks),
        *(drawn(h, 32, 8, skewed=False) for h in heads),
        *(drawn(h, 32, 8, skewed=True, seq=2048) for h in heads),
        *(drawn(h, 64, 1, skewed=True, seq=2048) for h in heads),
        *(uniform(h, b, q, 4096) for h in few for b in (1, 4) for q in (16, 64, 256)),
        *(uniform(h, b, 1, 4096) for h in few for b in (1, 8, 32, 128)),
        *(uniform(h, b, seq, seq) for h in heads for b, seq in prompts),
    ]


def quick_grid() -> list[RaggedCase]:
    """A few tiny steps for CPUs."""
    return [
        mixed(16, 1, 32, 64, num_decoding=4, seq=300),
        drawn(16, 8, 4, skewed=True, seq=200),
        uniform(16, 2, 16, 300),
        uniform(16, 1, 96, 96),
        uniform(16, 4, 1, 500),
    ]

"""The data of a timed call of `sparse_attention`: a decode workload whose queries have lists."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import roofline
import workload
from sparse_grid import ListCase, SparseCase, as_decode


@functools.lru_cache(maxsize=2)
def _positions(tokens: int, queries: int, topk: int, seed: int) -> np.ndarray:
    """[queries, topk] int32: distinct tokens of a sequence for each query, in random order."""
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(tokens, topk, replace=False) for _ in range(queries)]
    return np.array(drawn, np.int32)


def slots(case: SparseCase, seed: int = 0) -> np.ndarray:
    """Return [num_tokens, topk] int32 lists; entries behind the end of a list are -1."""
    place = _positions(case.seq, case.num_tokens, case.topk, seed)
    table = np.repeat(workload.page_table(case, seed), case.q_len, axis=0)
    page = np.take_along_axis(table, place // case.page_size, axis=1)
    found = page * case.page_size + place % case.page_size
    is_entry = np.arange(case.topk) < case.topk_lens[:, None]
    return np.where(is_entry, found, -1).astype(np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseWorkload(workload.Workload):
    """Operands of one call, with the page table and the lengths of the cache's sequences.

    Attributes:
      indices: int32 slots in the form of the queries, the same in all caches.
      topk_lens: int32 in the same form.
    """

    case: SparseCase
    pools: jax.Array
    indices: jax.Array
    topk_lens: jax.Array

    @property
    def call_operands(self) -> tuple[jax.Array, ...]:
        """The arguments of a call before its layer."""
        return self.q_nope, self.q_pe, self.pools, self.indices, self.topk_lens

    def with_cache_of(self, other: workload.Workload) -> "SparseWorkload":
        """Return the same call over the caches of another one."""
        assert isinstance(other.pools, jax.Array)
        return dataclasses.replace(
            self, pools=other.pools, tile=other.tile, kv_format=other.kv_format
        )

    def as_decode(self) -> "ListWorkload":
        """Return the same call in the terms of `decode`, for the check."""
        num_pages = int(self.case.pages_per_seq.sum())
        return ListWorkload(
            case=as_decode(self.case),
            q_nope=self.q_nope,
            q_pe=self.q_pe,
            pools=self.pools,
            page_table=self.indices.reshape(self.case.num_tokens, -1),
            seq_lens=self.topk_lens.reshape(-1),
            tile=self.tile.reshape(-1, 1, self.tile.shape[-1]),
            num_caches=self.num_caches,
            kv_format=self.kv_format,
            num_slots=num_pages * self.case.page_size,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListWorkload(workload.Workload):
    """A call in the terms of `decode`: pages of one token, of which the lists name only some.

    Attributes:
      num_slots: Rows of one cache.
    """

    case: ListCase
    num_slots: int

    def host_cache(self, cache: int, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As in a decode workload: the rows that the lists of a few queries name."""
        lens = self.case.seq_lens[sequences]
        lists = np.asarray(self.page_table[sequences])
        named = np.concatenate([row[:n] for row, n in zip(lists, lens, strict=True)])
        table = np.zeros((len(sequences), max(int(lens.max()), 1)), np.int32)
        table[np.arange(table.shape[1]) < lens[:, None]] = np.arange(len(named))
        return self.tile[(cache * self.num_slots + named) % len(self.tile)], table


def make(case: SparseCase, cached: workload.Workload) -> SparseWorkload:
    """Complete the caches of a workload with the queries and lists of a call."""
    base = workload.make_workload(case, cached.pools, cached.tile)
    form = case.query_shape[:-1]
    return SparseWorkload(
        **{
            **vars(base),
            "indices": jnp.asarray(slots(case).reshape(*form, case.topk)),
            "topk_lens": jnp.asarray(case.topk_lens.reshape(form)),
        }
    )


def num_caches(case: SparseCase, min_bytes: float, *, most: int | None = None) -> int:
    """Return how many caches to rotate over.

    The rows that their lists name have `min_bytes`. A prompt moves more for its queries: then as
    many as it takes to move so many bytes before a cache is used again.
    """
    rounds = max(2, math.ceil(min_bytes / roofline.num_bytes(case)))
    return workload.num_caches(case, min_bytes, most=min(rounds, most or rounds))

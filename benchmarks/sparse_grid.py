"""Which calls bench_sparse.py times. Pure data without JAX, as in grid.py."""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Iterable

import numpy as np
from grid import Case

TOPK = 2048
PREFILL_QUERIES, PREFILL_TOKENS = 4096, 32768
# Bytes of a row whose dtype is not that of the queries.
_ROW_BYTES = {"fp8_ds_mla": 656, "fp8_e4m3": 576}


@dataclasses.dataclass(frozen=True)
class SparseCase(Case):
    """One call. `batch`, `seq` and the pages are those of the cache, as for `decode`.

    Attributes:
      q_len: Queries of a sequence, each with a list of its own.
      topk: Width of the lists.
      mixed: Lists have from 0 to `topk` entries instead of `topk`.
      is_prefill: The queries of one prompt, in the form [tokens].
      kv_format: In which format the rows are counted; None for the dtype of the queries.
    """

    topk: int = TOPK
    mixed: bool = False
    is_prefill: bool = False
    kv_format: str | None = None

    @functools.cached_property
    def topk_lens(self) -> np.ndarray:
        """[num_tokens] int32 entries of each list. Mixed ones have 0 and `topk` among them."""
        lens = np.full(self.num_tokens, self.topk, np.int32)
        if self.mixed:
            rng = np.random.default_rng(1)
            lens[:] = rng.integers(0, self.topk, self.num_tokens, endpoint=True)
            lens[0], lens[-1] = 0, self.topk
        return lens

    @property
    def query_shape(self) -> tuple[int, ...]:
        """Shape of the queries before their last dimension."""
        by_token = self.is_prefill or self.q_len == 1
        rows = (self.num_tokens,) if by_token else (self.batch, self.q_len)
        return *rows, self.num_heads

    @property
    def num_pairs(self) -> int:
        """Entries of all lists."""
        return int(self.topk_lens.sum())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the cache."""
        plain = (self.d_ckv + self.d_kpe) * self.item_bytes
        return plain if self.kv_format is None else _ROW_BYTES[self.kv_format]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the rows that the lists name; one that several lists of a sequence name, once.

        As many as that are to be expected: a row is in none of q_len lists with a probability of
        (1 - topk / seq) ** q_len.
        """
        kept = np.prod(1 - self.topk_lens.reshape(self.batch, self.q_len) / self.seq, axis=1)
        return round(self.seq * float((1 - kept).sum())) * self.row_bytes

    @property
    def label(self) -> str:
        """Short name for the reports: batch, entries and tokens, heads, and what else differs."""
        entries = f"0-{self.topk}" if self.mixed else str(self.topk)
        if self.is_prefill:
            return f"prefill {self.q_len} k{entries} of {self.seq} h{self.num_heads}"
        parts = [f"b{self.batch} k{entries} of {self.seq} h{self.num_heads}"]
        parts += [f"q{self.q_len}"] * (self.q_len != 1)
        return " ".join(parts)

    def stored_as(self, kv_format: str | None) -> "SparseCase":
        """Return the same call with its rows counted in a format."""
        return dataclasses.replace(self, kv_format=kv_format)


@dataclasses.dataclass(frozen=True)
class ListCase(Case):
    """The same call in the terms of `decode`: a query is a sequence, a slot is a page.

    Attributes:
      lens: Entries of each list.
    """

    lens: tuple[int, ...] = ()

    @functools.cached_property
    def seq_lens(self) -> np.ndarray:
        """[batch] int32."""
        return np.array(self.lens, np.int32)


def as_decode(case: SparseCase) -> ListCase:
    """Return a call in the terms of `decode`."""
    lens = tuple(case.topk_lens.tolist())
    return ListCase(len(lens), case.num_heads, case.topk, page_size=1, dtype=case.dtype, lens=lens)


def tokens_of(batch: int) -> int:
    """Tokens of each sequence of a decode call in the published rows."""
    return 16384 if batch <= 32 else 8192


def decode_call(batch: int, num_heads: int, q_len: int = 1, topk: int = TOPK) -> SparseCase:
    """Return a call of sequences that decode."""
    return SparseCase(batch, num_heads, tokens_of(batch), q_len, topk=topk)


def prefill_call(num_heads: int, topk: int = TOPK) -> SparseCase:
    """Return a call of a prompt's queries."""
    return SparseCase(1, num_heads, PREFILL_TOKENS, PREFILL_QUERIES, topk=topk, is_prefill=True)


def full_grid() -> list[SparseCase]:
    """The published rows: those that say most come first, in case time runs out."""
    lists = [decode_call(128, h, topk=512) for h in (64, 128, 16)]
    mixed = [dataclasses.replace(decode_call(128, h), mixed=True) for h in (64, 128, 16)]
    return [
        *(decode_call(128, h) for h in (64, 128, 16)),
        *(prefill_call(h) for h in (64, 128, 16)),
        *(decode_call(8, h) for h in (64, 128, 16)),
        *(decode_call(8, h, 2) for h in (64, 128)),
        *(decode_call(b, h) for b in (32, 1) for h in (64, 128, 16)),
        *(decode_call(64, h) for h in (64, 128, 16)),
        *(decode_call(128, h, 2) for h in (64, 128)),
        *lists,
        *mixed,
    ]


def quick_grid() -> list[SparseCase]:
    """A few tiny calls that a CPU finishes in a minute."""
    small = SparseCase(batch=4, num_heads=16, seq=1024, topk=256)
    return [
        small,
        dataclasses.replace(small, batch=1, num_heads=64),
        dataclasses.replace(small, batch=2, q_len=2),
        dataclasses.replace(small, topk=64),
        dataclasses.replace(small, mixed=True),
        dataclasses.replace(small, batch=1, q_len=8, is_prefill=True),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the shapes."""
    group = parser.add_argument_group("shapes (default: the published rows)")
    group.add_argument("--quick", action="store_true", help="a few tiny calls that fit a CPU")
    group.add_argument("--only", metavar="REGEX", default="", help="rows whose names match")
    group.add_argument("--batch", type=int, nargs="+", help="batch sizes (default 8)")
    group.add_argument("--heads", type=int, nargs="+", help="query heads (default 64)")
    group.add_argument("--q-len", type=int, nargs="+", help="queries a sequence (default 1)")
    group.add_argument("--topk", type=int, nargs="+", help=f"entries a list (default {TOPK})")
    group.add_argument(
        "--seq", type=int, help="tokens a sequence (default 16384, above batch 32 8192)"
    )
    group.add_argument("--mixed", action="store_true", help="lists of 0 to --topk entries")


def cases_from_arguments(args: argparse.Namespace) -> list[SparseCase]:
    """Return the chosen calls.

    Each of --batch, --heads, --q-len, --topk, --seq and --mixed selects the product of all instead
    of the published rows.

    Raises:
      ValueError: A list is longer than its sequence.
    """
    if not (args.batch or args.heads or args.q_len or args.topk or args.seq or args.mixed):
        return quick_grid() if args.quick else full_grid()
    cases = [
        dataclasses.replace(decode_call(b, h, q, k), mixed=args.mixed, seq=args.seq or tokens_of(b))
        for b in args.batch or [8]
        for q in args.q_len or [1]
        for k in args.topk or [TOPK]
        for h in args.heads or [64]
    ]
    for case in cases:
        if not 1 <= case.topk <= case.seq:
            raise ValueError(
                f"--topk: expected from 1 to {case.seq} entries, the tokens of a sequence, "
                f"got {case.topk}"
            )
    return cases


def by_pool(cases: Iterable[SparseCase]) -> list[list[SparseCase]]:
    """Group calls that follow each other and can be timed over the same caches."""
    return [list(group) for _, group in itertools.groupby(cases, lambda case: case.pool_key)]

"""Which calls bench_index.py times. Pure data without JAX, as in grid.py."""

import argparse
import dataclasses
import functools
import re

import numpy as np

TOPK = 2048
DIM = 128  # of an index key
KEY_BYTES = DIM + 4  # codes and a scale
PAGE_SIZE = 64
PREFILL_TOKENS = 4096


@dataclasses.dataclass(frozen=True)
class IndexCase:
    """One call of `index_topk`, FP8 keys and queries.

    Attributes:
      batch: Sequences.
      seq: Tokens in the cache of each, the new ones included.
      num_heads: Index heads.
      q_len: New tokens of each sequence: one, or a chunk of a prompt.
      topk: How many tokens are chosen.
    """

    batch: int
    seq: int
    num_heads: int
    q_len: int = 1
    topk: int = TOPK

    @property
    def is_prefill(self) -> bool:
        """Whether sequences have several new tokens."""
        return self.q_len > 1

    @property
    def num_tokens(self) -> int:
        """Queries of all sequences."""
        return self.batch * self.q_len

    @functools.cached_property
    def visible(self) -> np.ndarray:
        """[q_len]: how many tokens each query of a sequence sees."""
        return np.arange(self.seq - self.q_len, self.seq) + 1

    @property
    def num_pages(self) -> int:
        """Pages of one cache."""
        return self.batch * -(-self.seq // PAGE_SIZE)

    @property
    def num_pairs(self) -> int:
        """Scores that are needed: none for a query that sees at most `topk` tokens."""
        return self.batch * int(self.visible[self.visible > self.topk].sum())

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys that a call has to read."""
        return self.batch * self.seq * KEY_BYTES if self.num_pairs else 0

    @property
    def num_bytes(self) -> int:
        """Least bytes that a call moves: keys, queries with their weights, and lists, each once."""
        query = self.num_heads * (DIM + 4) if self.num_pairs else 0
        return self.key_bytes + self.num_tokens * (query + 4 * self.topk + 4)

    @property
    def num_flops(self) -> int:
        """Operations of the products."""
        return 2 * DIM * self.num_heads * self.num_pairs

    @property
    def label(self) -> str:
        """Short name for the reports."""
        if self.is_prefill:
            name = f"prefill {self.q_len} behind {self.seq - self.q_len}"
            name = name if self.batch == 1 else f"b{self.batch} {name}"
        else:
            name = f"b{self.batch} s{self.seq}"
        return f"{name} h{self.num_heads}" + f" k{self.topk}" * (self.topk != TOPK)


@dataclasses.dataclass(frozen=True)
class AppendCase:
    """One call of `index_append`, FP8 keys.

    Attributes:
      batch: Sequences.
      q_len: New tokens of each.
      seq: Tokens in the cache of each, the new ones included.
      is_raw: Whether keys are normalised and rotated on their way.
    """

    batch: int
    q_len: int
    seq: int
    is_raw: bool = False

    @property
    def label(self) -> str:
        """Short name for the reports."""
        return f"append {self.batch * self.q_len}" + " raw" * self.is_raw


def prefill_call(behind: int, num_heads: int) -> IndexCase:
    """Return a call of a chunk of one prompt."""
    return IndexCase(1, behind + PREFILL_TOKENS, num_heads, PREFILL_TOKENS)


def full_grid() -> list[IndexCase]:
    """The published rows: those that say most come first, in case time runs out."""
    k = 1024
    sizes = [(1, 32 * k), (1, 128 * k), (32, 32 * k), (128, 8 * k), (128, 32 * k), (1, 2 * k)]
    return [
        *(IndexCase(batch, seq, 64) for batch, seq in sizes),
        *(prefill_call(behind * k, heads) for behind in (8, 32, 128) for heads in (32, 64)),
        *(IndexCase(batch, seq, 32) for batch, seq in sizes),
    ]


def append_grid() -> list[AppendCase]:
    """The published rows of `index_append`."""
    step, prompt = AppendCase(128, 1, 1024), AppendCase(1, 8192, 8192)
    return [
        dataclasses.replace(case, is_raw=raw) for raw in (False, True) for case in (step, prompt)
    ]


def quick_grid() -> tuple[list[IndexCase], list[AppendCase]]:
    """A few tiny calls that a CPU finishes in a minute."""
    calls = [
        IndexCase(1, 512, 16, topk=64),
        IndexCase(4, 300, 8, topk=64),
        IndexCase(2, 64, 8, topk=64),
        IndexCase(1, 160, 8, q_len=32, topk=64),
    ]
    return calls, [AppendCase(4, 1, 64), AppendCase(1, 32, 64, is_raw=True)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the shapes."""
    group = parser.add_argument_group("shapes (default: the published rows)")
    group.add_argument("--quick", action="store_true", help="a few tiny calls that fit a CPU")
    group.add_argument("--only", metavar="REGEX", default="", help="rows whose names match")
    group.add_argument("--batch", type=int, nargs="+", help="batch sizes (default 1)")
    group.add_argument("--seq", type=int, nargs="+", help="tokens a sequence (default 32768)")
    group.add_argument("--heads", type=int, nargs="+", help="index heads (default 64)")
    group.add_argument("--q-len", type=int, nargs="+", help="new tokens a sequence (default 1)")
    group.add_argument("--topk", type=int, nargs="+", help=f"entries a list (default {TOPK})")


def cases_from_arguments(args: argparse.Namespace) -> tuple[list[IndexCase], list[AppendCase]]:
    """Return the chosen calls of `index_topk` and of `index_append`.

    Each of --batch, --seq, --heads, --q-len and --topk selects the product of all instead of the
    published rows.

    Raises:
      ValueError: A sequence has more new tokens than tokens.
    """
    if args.batch or args.seq or args.heads or args.q_len or args.topk:
        calls = [
            IndexCase(b, seq, h, q_len, k)
            for b in args.batch or [1]
            for seq in args.seq or [32768]
            for q_len in args.q_len or [1]
            for k in args.topk or [TOPK]
            for h in args.heads or [64]
        ]
        appends: list[AppendCase] = []
    else:
        calls, appends = quick_grid() if args.quick else (full_grid(), append_grid())
    for case in calls:
        if not 1 <= case.q_len <= case.seq:
            raise ValueError(
                f"--q-len: expected from 1 to {case.seq} new tokens, the tokens of a sequence, "
                f"got {case.q_len}"
            )
    keep = re.compile(args.only).search
    return [c for c in calls if keep(c.label)], [c for c in appends if keep(c.label)]

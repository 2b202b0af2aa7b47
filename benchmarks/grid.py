"""Which shapes are timed: the published grid, a small one for CPUs, and any other shape.

A case is pure data without JAX. So the roofline and the reports can be tested without a device.
"""

import argparse
import csv
import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np

# DeepSeek's scale: one over the root of the unabsorbed head dimension (128 + 64).
SM_SCALE = 192.0**-0.5

# mean length -> seed. With the shape 1.5, these seeds reproduce mean and longest length of the two
# published draws of 64 lengths: (1024, 7930) exactly, and (1806, 25027) within 0.02 of the mean.
_PARETO_SHAPE = 1.5
_PARETO_SEEDS = {1024: 26770, 1806: 348493}


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of a decode call.

    Attributes:
      seq: Tokens in the cache of every sequence, or the mean when `skewed`.
      skewed: Lengths are drawn from a Pareto distribution instead of being equal.
      layout: "packed" (one pool, rows ckv|kpe) or "split" (one pool for each).
    """

    batch: int
    num_heads: int
    seq: int
    q_len: int = 1
    skewed: bool = False
    page_size: int = 64
    dtype: str = "bfloat16"
    layout: str = "packed"
    d_ckv: int = 512
    d_kpe: int = 64

    @functools.cached_property
    def seq_lens(self) -> np.ndarray:
        """[batch] int32 tokens in the cache, the new ones included."""
        if self.skewed:
            return pareto_lengths(self.batch, self.seq)
        return np.full(self.batch, self.seq, np.int32)

    @property
    def q_lens(self) -> np.ndarray:
        """[batch] new tokens of each sequence."""
        return np.full(self.batch, self.q_len)

    @property
    def query_shape(self) -> tuple[int, ...]:
        """Shape of the queries before their last dimension."""
        return self.batch, self.q_len, self.num_heads

    @property
    def num_pairs(self) -> int:
        """Query tokens times tokens that each attends to (the causal corner is ignored)."""
        return int(self.seq_lens.sum()) * self.q_len

    @property
    def written_bytes(self) -> int:
        """Bytes of the cache that a call writes."""
        return 0

    @property
    def cu_q_lens(self) -> np.ndarray:
        """[batch + 1] int32: where the tokens of each sequence begin, and the last ones end."""
        return np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32)

    @property
    def num_tokens(self) -> int:
        """Query tokens of all sequences."""
        return int(self.q_lens.sum())

    @property
    def item_bytes(self) -> int:
        """Bytes of one value of the queries, the cache and the output."""
        return 4 if self.dtype == "float32" else 2

    @property
    def cache_bytes(self) -> int:
        """Bytes of all tokens of one cache, which a call has to read."""
        return int(self.seq_lens.sum()) * (self.d_ckv + self.d_kpe) * self.item_bytes

    @property
    def pages_per_seq(self) -> np.ndarray:
        """[batch] pages that each sequence holds."""
        return -(-self.seq_lens // self.page_size)

    @property
    def label(self) -> str:
        """Short name for the reports: batch, tokens, heads, and what differs from the defaults."""
        seq = f"~{self.seq}" if self.skewed else str(self.seq)
        parts = [f"b{self.batch} s{seq} h{self.num_heads}"]
        parts += [f"q{self.q_len}"] * (self.q_len != 1)
        parts += [f"p{self.page_size}"] * (self.page_size != 64)
        parts += [self.layout] * (self.layout != "packed")
        parts += [self.dtype] * (self.dtype != "bfloat16")
        parts += [f"d{self.d_ckv}+{self.d_kpe}"] * ((self.d_ckv, self.d_kpe) != (512, 64))
        return " ".join(parts)

    @property
    def pool_key(self) -> tuple:
        """Cases with equal keys can be timed over the same caches."""
        return (
            self.batch,
            self.seq,
            self.skewed,
            self.page_size,
            self.dtype,
            self.layout,
            self.d_ckv,
            self.d_kpe,
        )


def pareto_lengths(num: int, mean: int) -> np.ndarray:
    """Draw `num` lengths of the given mean, most of them short and a few very long.

    Args:
      num: How many lengths.
      mean: Their mean before rounding.

    Returns:
      [num] int32, at least 1, always the same for the same arguments.
    """
    rng = np.random.default_rng(_PARETO_SEEDS.get(mean, 0))
    draw = rng.pareto(_PARETO_SHAPE, num) + 1.0
    return np.maximum(np.rint(draw * mean / draw.mean()), 1).astype(np.int32)


def full_grid() -> list[Case]:
    """The 51 rows of the published table, in its order."""
    sizes = [(b, h, s) for h in (16, 64, 128) for b in (1, 8, 32, 128) for s in (1024, 4096, 8192)]
    sizes += [(1, 16, 32768), (1, 128, 32768), (128, 16, 32768), (128, 128, 32768)]
    sizes += [(4, 128, 131072)]
    cases = [Case(batch=b, num_heads=h, seq=s) for b, h, s in sizes]
    for q_len in (2, 4):
        cases += [Case(b, h, 4096, q_len) for h in (16, 128) for b in (8, 128)]
    return cases + [
        Case(batch=64, num_heads=16, seq=1024, skewed=True),
        Case(batch=64, num_heads=128, seq=1806, skewed=True),
    ]


def page_size_grid() -> list[Case]:
    """Some rows of the published table at the other page sizes that serving systems use."""
    shapes = [(1, 16, 8192), (8, 16, 4096), (8, 128, 4096), (32, 64, 4096)]
    shapes += [(128, 16, 4096), (128, 128, 4096)]
    return [Case(b, h, seq, page_size=size) for size in (32, 16, 1) for b, h, seq in shapes]


def quick_grid() -> list[Case]:
    """A few rows that a laptop's CPU finishes in about a minute."""
    return [
        Case(batch=1, num_heads=16, seq=1024),
        Case(batch=1, num_heads=16, seq=8192),
        Case(batch=8, num_heads=16, seq=4096),
        Case(batch=8, num_heads=16, seq=4096, q_len=2),
        Case(batch=4, num_heads=128, seq=1024),
        Case(batch=16, num_heads=16, seq=1024, skewed=True),
    ]


def parse_seq(text: str) -> tuple[int, bool]:
    """Parse one `--seq` value: "8192", or "skewed:1024" for Pareto lengths of that mean.

    Raises:
      argparse.ArgumentTypeError: The text is neither.
    """
    kind, _, number = text.rpartition(":")
    if kind not in ("", "skewed") or not number.isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"expected TOKENS or skewed:MEAN, got {text!r}")
    return int(number), kind == "skewed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the shapes."""
    group = parser.add_argument_group("shapes (default: the published grid)")
    group.add_argument("--quick", action="store_true", help="a small grid that fits a CPU")
    group.add_argument("--batch", type=int, nargs="+", help="batch sizes (default 8)")
    group.add_argument("--heads", type=int, nargs="+", help="query heads (default 16)")
    group.add_argument(
        "--seq", type=parse_seq, nargs="+", metavar="N|skewed:MEAN", help="tokens (default 4096)"
    )
    group.add_argument("--q-len", type=int, nargs="+", help="new tokens a sequence (default 1)")
    group.add_argument("--page-size", type=int, nargs="+", default=[64])
    group.add_argument(
        "--with-page-sizes",
        action="store_true",
        help="after the published grid, some of its rows with pages of 32, 16 and 1 token",
    )
    group.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    group.add_argument("--layout", choices=("packed", "split"), default="packed")
    group.add_argument(
        "--dims", type=int, nargs=2, default=(512, 64), metavar=("D_CKV", "D_KPE"), help="512 64"
    )


def cases_from_arguments(args: argparse.Namespace) -> list[Case]:
    """Return the chosen cases.

    Each of --batch, --heads, --seq and --q-len selects the product of the four instead of a grid.
    Page size, dtype, layout and dims apply to both.
    """
    extra: list[Case] = []
    if args.batch or args.heads or args.seq or args.q_len:
        base = [
            Case(batch=b, num_heads=h, seq=seq, q_len=q, skewed=skewed)
            for seq, skewed in args.seq or [(4096, False)]
            for q in args.q_len or [1]
            for h in args.heads or [16]
            for b in args.batch or [8]
        ]
    else:
        base = quick_grid() if args.quick else full_grid()
        extra = page_size_grid() if args.with_page_sizes else []
    d_ckv, d_kpe = args.dims
    sized = [dataclasses.replace(c, page_size=size) for size in args.page_size for c in base]
    return [
        dataclasses.replace(case, dtype=args.dtype, layout=args.layout, d_ckv=d_ckv, d_kpe=d_kpe)
        for case in dict.fromkeys([*sized, *extra])
    ]


def by_pool(cases: Iterable[Case]) -> list[list[Case]]:
    """Group the cases that share caches, in order of first appearance.

    Groups that differ only in their page size follow each other, because they will be compared.
    """
    groups: dict[tuple, dict[tuple, list[Case]]] = {}
    for case in cases:
        alike = groups.setdefault(dataclasses.replace(case, page_size=1).pool_key, {})
        alike.setdefault(case.pool_key, []).append(case)
    return [group for alike in groups.values() for group in alike.values()]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The peers' times for a case, measured earlier on one H200 (see peers/h200.csv)."""

    floor_us: float
    flash_mla_us: float
    flash_mla_schedule_us: float
    flashinfer_us: float

    @property
    def best_us(self) -> float:
        """The faster of the two, without schedules."""
        return min(self.flash_mla_us, self.flashinfer_us)


@functools.cache
def recorded_peers() -> dict[Case, Recorded]:
    """The recorded figures of the peers by case."""
    path = pathlib.Path(__file__).parent / "peers" / "h200.csv"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    rows: Sequence[dict[str, str]] = list(csv.DictReader(lines))
    table = {}
    for row in rows:
        seq, skewed = parse_seq(row["seq"])
        case = Case(int(row["batch"]), int(row["heads"]), seq, int(row["q_len"]), skewed)
        table[case] = Recorded(
            float(row["floor_us"]),
            float(row["flash_mla_us"]),
            float(row["flash_mla_schedule_us"]),
            float(row["flashinfer_us"]),
        )
    return table

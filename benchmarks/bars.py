"""Targets for the Hopper kernels on an H200, and what a run reaches of them.

A bar is a group of rows and one figure of them: `must` is the target, `aim` a better one to strive
for. Rates and times over the floor are meaningful on an H200 only, ratios on any card.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from grid import Case
from sparse_grid import TOPK, SparseCase

# What a user would call instead of jax_mla. Ratios are to these, not to other contenders.
_RIVALS = ("flash_mla", "flashinfer")
# What a contender with queries in e4m3 is called after its format, and its one rival.
QUERY_CODES = ", e4m3 queries"
_CODES_RIVALS = (f"flash_mla_fp8 fp8_e4m3{QUERY_CODES}",)

# What bench_decode.py appends to the name of ours where the page table is wider than the lengths,
# and where max_seq_len says so besides.
WIDE_TABLE, BOUND = ", wide table", ", wide table, max_seq_len"

# A streaming launch: start-up and drain, and the rate of bulk copies of random pages.
_LAUNCH_US = 2.7
_BYTES_PER_US = 4.55e6

Row = Mapping[str, Any]
# figure(case, row, name of ours) -> the row's figure; None where it has none.
Figure = Callable[[Any, Row, str], float | None]


def best_peer_over_ours(row: Row, name: str) -> float | None:
    """The fastest peer's time in the same run over that of one of our contenders."""
    rivals = _CODES_RIVALS if name.endswith(QUERY_CODES) else _RIVALS
    times = [row["times"][rival]["us"] for rival in rivals if rival in row["times"]]
    return min(times) / row["times"][name]["us"] if times else None


def _ratio(_: Case, row: Row, name: str) -> float | None:
    return best_peer_over_ours(row, name)


def _tb_per_s(_: Case, row: Row, name: str) -> float:
    return row["times"][name]["tb_per_s"]


def _us_above(floors: float) -> Figure:
    """Time beyond `floors` times the floor, in us."""
    return lambda _, row, name: row["times"][name]["us"] - floors * row["floor_us"]


def _us_above_stream(_: Case, row: Row, name: str) -> float:
    """Time beyond a launch that only streams the row's bytes, in us."""
    return row["times"][name]["us"] - row["bytes"] / _BYTES_PER_US


@dataclasses.dataclass(frozen=True)
class Bar:
    """A target for a group of rows.

    Attributes:
      name: Group and figure.
      holds: Whether a case belongs to the group.
      figure: The figure of one row.
      must: The figure to reach, or None.
      aim: The figure to strive for, or None.
      mean: Whether the geometric mean of the rows counts, instead of the worst row.
      at_most: Whether smaller is better.
      h200_only: Whether the figure depends on the rates of an H200.
    """

    name: str
    holds: Callable[[Any], bool]
    figure: Figure
    must: float | None = None
    aim: float | None = None
    mean: bool = False
    at_most: bool = False
    h200_only: bool = False


def _small(case: Case) -> bool:
    return case.batch in (1, 8) and not case.skewed


def _middle(case: Case) -> bool:
    return case.batch == 32 or case.skewed


def _streaming(seq: int) -> Callable[[Case], bool]:
    return lambda case: (
        case.batch == 128 and case.num_heads in (16, 64) and case.seq == seq and not case.skewed
    )


def _math_bound(case: Case) -> bool:
    return case.batch == 128 and case.num_heads == 128 and case.seq >= 4096 and case.q_len <= 4


BARS = (
    Bar("best peer / ours, every row", lambda _: True, _ratio, must=1.0),
    Bar("best peer / ours, all rows, mean", lambda _: True, _ratio, 1.3, 1.45, mean=True),
    Bar("best peer / ours, batch 1 and 8, mean", _small, _ratio, 1.6, mean=True),
    Bar("us - floor, batch 1 and 8", _small, _us_above(1.0), aim=6, at_most=True, h200_only=True),
    Bar("best peer / ours, batch 32 and skewed, mean", _middle, _ratio, 1.25, mean=True),
    Bar("us - 1.08 floor, batch 32 and skewed", _middle, _us_above(1.08), aim=4, at_most=True,
        h200_only=True),
    *(
        Bar(f"TB/s, batch 128, 16 and 64 heads, {seq}", _streaming(seq), _tb_per_s, must,
            h200_only=True)
        for seq, must in ((4096, 4.25), (8192, 4.4), (32768, 4.5))
    ),
    Bar("us - bytes / 4.55 TB/s, batch 128, 16 and 64 heads",
        lambda case: any(_streaming(seq)(case) for seq in (4096, 8192, 32768)),
        _us_above_stream, aim=_LAUNCH_US, at_most=True, h200_only=True),
    Bar("best peer / ours, batch 128, 128 heads, 4096+", _math_bound, _ratio, 1.05, 1.12),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reached:
    """A run measured by a bar. `worst` and `worst_case` are those of the row furthest from it."""

    name: str
    rows: int
    reached: float
    must: float | None
    aim: float | None
    met: bool | None
    worst: float
    worst_case: str


def measured(bar: Bar, figures: list[tuple[float, str]]) -> Reached:
    """Measure (figure, name) of rows by a bar."""
    worst, worst_case = (max if bar.at_most else min)(figures)
    mean = float(np.exp(np.mean(np.log([figure for figure, _ in figures])))) if bar.mean else worst
    met = None
    if bar.must is not None:
        met = mean <= bar.must if bar.at_most else mean >= bar.must
    return Reached(bar.name, len(figures), mean, bar.must, bar.aim, met, worst, worst_case)


def _page_sizes(rows: Mapping[Case, Row], name: str) -> Reached | None:
    """Time at other page sizes over that at pages of 64, rows of one shape in the same run."""
    figures = []
    for case, row in rows.items():
        base = rows.get(dataclasses.replace(case, page_size=64), {"times": {}})["times"]
        if case.page_size != 64 and name in base and name in row["times"]:
            figures.append((row["times"][name]["us"] / base[name]["us"], row["case"]))
    bar = Bar("us / us with pages of 64", lambda _: True, _ratio, 1.08, 1.03, at_most=True)
    return measured(bar, figures) if figures else None


def _bounds(rows: Mapping[Case, Row], name: str) -> Reached | None:
    """Time with max_seq_len in a wide table over that in an exact one, in the same run."""
    figures = [
        (row["times"][name + BOUND]["us"] / row["times"][name]["us"], row["case"])
        for row in rows.values()
        if name in row["times"] and name + BOUND in row["times"]
    ]
    # One row scatters by some percent.
    bar = Bar("us with max_seq_len / us in an exact table, mean", lambda _: True, _ratio, 1.01, 1.0,
              mean=True, at_most=True)  # fmt: skip
    return measured(bar, figures) if figures else None


def reached(rows: Mapping[Case, Row], name: str, *, on_h200: bool) -> list[Reached]:
    """Measure a run by the bars.

    Args:
      rows: Rows by case.
      name: Which of our contenders.
      on_h200: Whether the run took place on an H200.

    Returns:
      The bars that the run has rows for. The last ones compare page sizes, and page tables wider
      than the lengths with exact ones; all others are about pages of 64.
    """
    found = []
    for bar in BARS:
        if bar.h200_only and not on_h200:
            continue
        figures = [
            (figure, row["case"])
            for case, row in rows.items()
            if case.page_size == 64 and bar.holds(case) and name in row["times"]
            if (figure := bar.figure(case, row, name)) is not None
        ]
        if figures:
            found.append(measured(bar, figures))
    return [*found, *filter(None, (_page_sizes(rows, name), _bounds(rows, name)))]


def _sparse_decode(case: SparseCase) -> bool:
    """The published rows of 64 and 128 heads; lists of other lengths have a bar of their own."""
    return (
        not case.is_prefill and case.topk == TOPK and not case.mixed and case.num_heads in (64, 128)
    )


def _sparse_decode_16(case: SparseCase) -> bool:
    return not case.is_prefill and case.topk == TOPK and not case.mixed and case.num_heads == 16


def _other_lists(case: SparseCase) -> bool:
    return case.topk < TOPK or case.mixed


def _sparse_prefill(*heads: int) -> Callable[[SparseCase], bool]:
    return lambda case: case.is_prefill and case.num_heads in heads


def _us(_: Case, row: Row, name: str) -> float:
    return row["times"][name]["us"]


def _tflop_per_s(_: Case, row: Row, name: str) -> float:
    return row["times"][name]["tflop_per_s"]


# (suffix of the name of ours, bar). FlashMLA decodes FP8 rows only, and pads 16 heads to 64.
SPARSE_BARS = (
    ("", Bar("peer / ours, decode, every row", _sparse_decode, _ratio, 1.1)),
    ("", Bar("peer / ours, decode, mean", _sparse_decode, _ratio, aim=1.5, mean=True)),
    ("", Bar("peer / ours, decode, 16 heads", _sparse_decode_16, _ratio, 1.5)),
    ("", Bar("peer / ours, prefill", _sparse_prefill(64, 128), _ratio, 1.0, 1.1)),
    ("", Bar("TFLOP/s, prefill", _sparse_prefill(64, 128), _tflop_per_s, aim=640, h200_only=True)),
    ("", Bar("us, prefill, 16 heads", _sparse_prefill(16), _us, 1300, 900, at_most=True,
             h200_only=True)),
    (" fp8_ds_mla", Bar("peer / ours, decode, every row", _sparse_decode, _ratio, 1.15)),
    (" fp8_ds_mla", Bar("peer / ours, decode, mean", _sparse_decode, _ratio, aim=1.6, mean=True)),
    (" fp8_ds_mla", Bar("peer / ours, decode, 16 heads", _sparse_decode_16, _ratio, 1.8)),
)  # fmt: skip


def _compared(
    bar: Bar,
    rows: Mapping[SparseCase, Row],
    name: str,
    base_of: Callable[[SparseCase], tuple[SparseCase, str]],
    figure: Callable[[float, SparseCase], float] = lambda us, _: us,
) -> Reached | None:
    """Compare rows with others of the same run, which are their base."""
    figures = []
    for case, row in rows.items():
        base_case, base_name = base_of(case)
        base = rows.get(base_case, {"times": {}})["times"]
        if bar.holds(case) and name in row["times"] and base_name in base:
            ours = figure(row["times"][name]["us"], case)
            figures.append((ours / figure(base[base_name]["us"], base_case), row["case"]))
    return measured(bar, figures) if figures else None


def reached_sparse(rows: Mapping[Any, Row], name: str, *, on_h200: bool) -> list[Reached]:
    """Measure a run of bench_sparse.py by the bars.

    Args:
      rows: Rows by case.
      name: Which of our contenders, without a format.
      on_h200: Whether the run took place on an H200.

    Returns:
      The bars that the run has rows for. Those behind the ones of `SPARSE_BARS` compare rows or
      formats of the run.
    """
    found: list[Reached | None] = []
    for suffix, bar in SPARSE_BARS:
        mine = name + suffix
        figures = [
            (figure, row["case"])
            for case, row in rows.items()
            if bar.holds(case) and mine in row["times"]
            if (figure := bar.figure(case, row, mine)) is not None
        ]
        if figures and (on_h200 or not bar.h200_only):
            named = dataclasses.replace(bar, name=f"{(suffix or ' bfloat16')[1:]}: {bar.name}")
            found.append(measured(named, figures))
    for suffix in ("", " fp8_ds_mla", " fp8_e4m3"):
        mine, label = name + suffix, (suffix or " bfloat16")[1:]
        half = Bar(f"{label}: us of 16 heads / us of 64", _sparse_decode_16, _us, aim=0.5,
                   at_most=True)  # fmt: skip
        found.append(_compared(
            half, rows, mine, lambda case, own=mine: (dataclasses.replace(case, num_heads=64), own)
        ))  # fmt: skip
        lists = Bar(f"{label}: us an entry / us an entry of {TOPK}", _other_lists, _us, 1.3,
                    at_most=True)  # fmt: skip
        found.append(_compared(
            lists, rows, mine,
            lambda case, own=mine: (dataclasses.replace(case, topk=TOPK, mixed=False), own),
            lambda us, case: us / case.num_pairs,
        ))  # fmt: skip
    # One row scatters by some percent.
    e4m3 = Bar("fp8_e4m3: us / us of fp8_ds_mla, decode, mean",
               lambda case: _sparse_decode(case) or _sparse_decode_16(case), _us, 1.0, mean=True,
               at_most=True)  # fmt: skip
    found.append(
        _compared(e4m3, rows, f"{name} fp8_e4m3", lambda case: (case, f"{name} fp8_ds_mla"))
    )
    return [bar for bar in found if bar is not None]

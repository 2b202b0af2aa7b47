"""Targets for `index_topk` and `index_append` on an H200, and what a run reaches of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import bars
from index_grid import TOPK, IndexCase
from peers import deep_gemm

# (batch, tokens) of a call with 64 index heads: us that must be reached, us to strive for.
_DECODE_US = {
    (1, 2048): (4.0, 2.0),
    (1, 32768): (11.0, 8.0),
    (1, 131072): (18.0, 12.0),
    (32, 32768): (54.0, 46.0),
    (128, 8192): (52.0, 46.0),
    (128, 32768): (165.0, 150.0),
}
# Index heads: time of a prompt's call over DeepGEMM's scores alone.
_PREFILL_RATIO = {32: (1.3, 1.1), 64: (1.2, 1.05)}
_APPEND_US = 0.5  # above `append` of as many bytes


def over_scores(row: bars.Row, name: str) -> float | None:
    """Time of one of our contenders over DeepGEMM's scores alone in the same run."""
    scores = row["times"].get(deep_gemm.SCORES)
    return row["times"][name]["us"] / scores["us"] if scores else None


def _us(_: Any, row: bars.Row, name: str) -> float:
    return row["times"][name]["us"]


def _bars() -> list[bars.Bar]:
    found = []
    for (batch, seq), (must, aim) in _DECODE_US.items():
        case = IndexCase(batch, seq, 64)
        found.append(bars.Bar(f"us, {case.label}", case.__eq__, _us, must, aim, at_most=True,
                              h200_only=True))  # fmt: skip
    for heads, (must, aim) in _PREFILL_RATIO.items():

        def holds(case: IndexCase, heads: int = heads) -> bool:
            return case.is_prefill and (case.num_heads, case.topk) == (heads, TOPK)

        found.append(bars.Bar(
            f"us / us of DeepGEMM's scores, prefill, {heads} heads", holds,
            lambda _, row, name: over_scores(row, name), must, aim, at_most=True,
        ))  # fmt: skip
    return found


BARS = tuple(_bars())


def reached(
    rows: Mapping[IndexCase, bars.Row], appends: Sequence[bars.Row], name: str, *, on_h200: bool
) -> list[bars.Reached]:
    """Measure a run by the bars.

    Args:
      rows: Rows of `index_topk` by case.
      appends: Rows of `index_append`, with `append` of as many bytes beside it.
      name: Which of our contenders.
      on_h200: Whether the run took place on an H200.

    Returns:
      The bars that the run has rows for.
    """
    found = []
    for bar in BARS:
        figures = [
            (figure, row["case"])
            for case, row in rows.items()
            if bar.holds(case) and name in row["times"]
            if (figure := bar.figure(case, row, name)) is not None
        ]
        if figures and (on_h200 or not bar.h200_only):
            found.append(bars.measured(bar, figures))
    beyond = [
        (row["times"]["jax_mla"]["us"] - row["times"]["jax_mla append"]["us"], row["case"])
        for row in appends
        if row["times"]
    ]
    if beyond and on_h200:
        bar = bars.Bar("index_append: us above append", lambda _: True, _us, _APPEND_US,
                       at_most=True, h200_only=True)  # fmt: skip
        found.append(bars.measured(bar, beyond))
    return found


def as_json(found: list[bars.Reached]) -> list[dict[str, Any]]:
    """What a report keeps of them."""
    return [dataclasses.asdict(bar) for bar in found]

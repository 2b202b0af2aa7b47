"""The rows of bench_decode.py as lines of its table, and what they come to."""

from typing import Any

import numpy as np
import report
from grid import Case

COLUMNS = (
    ("case", "s"), ("implementation", "s"), ("us", ".1f"), ("kernels us", ".1f"),
    ("floor us", ".1f"), ("x floor", ".2f"), ("TB/s", ".3g"), ("TFLOP/s", ".3g"),
    ("doubling", "s"), ("spread", ".1%"), ("rel. error", ".1e"), ("peer / ours", ".2f"),
    ("recorded / ours", ".2f"),
)  # fmt: skip

# What a user would call instead of us; the others are there for orientation.
_RIVALS = ("flash_mla", "flashinfer")


def best_peer_over_ours(row: dict[str, Any], name: str) -> float | None:
    """The fastest peer's time in the same run over that of one of our contenders."""
    times = [row["times"][rival]["us"] for rival in _RIVALS if rival in row["times"]]
    return min(times) / row["times"][name]["us"] if times else None


def _doubling_text(entry: dict[str, Any]) -> str | None:
    """The discrepancy between half and all of the calls, with a mark where it is too large."""
    if "doubling" not in entry:
        return None
    return f"{entry['doubling']:+.1%}" + (" !" if entry["suspect"] else "")


def print_row(table: report.Table, row: dict[str, Any], recorded_us: float | None) -> None:
    """Print a line for every contender of a row."""
    for name, entry in row["times"].items():
        ours = name.startswith("jax_mla")
        table.row([
            row["case"], name,
            entry["us"], entry.get("kernels_us"), row["floor_us"], entry["over_floor"],
            entry["tb_per_s"], entry["tflop_per_s"], _doubling_text(entry), entry["spread"],
            entry["relative_error"], best_peer_over_ours(row, name) if ours else None,
            recorded_us / entry["us"] if recorded_us and ours else None,
        ])  # fmt: skip


def _geometric_mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def summarize(rows: dict[Case, dict[str, Any]]) -> dict[str, Any]:
    """Geometric means by contender over the rows: time over floor, over the first's time."""
    summary: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows.values() for name in row["times"]):
        mine = [row for row in rows.values() if name in row["times"]]
        first = [next(iter(row["times"].values()))["us"] for row in mine]
        summary[name] = {
            "rows": len(mine),
            "over_floor": _geometric_mean([row["times"][name]["over_floor"] for row in mine]),
            "time_over_first": _geometric_mean(
                [row["times"][name]["us"] / us for row, us in zip(mine, first, strict=True)]
            ),
        }
        if name.startswith("jax_mla"):
            summary[name]["best_peer_over_ours"] = against_peers(rows, name)
    return summary


def print_summary(summary: dict[str, Any]) -> None:
    """Print the means, a line each."""
    for name, means in summary.items():
        print(
            f"# {name}: geometric mean {means['over_floor']:.2f} x floor, "
            f"{means['time_over_first']:.2f} x the first, over {means['rows']} rows"
        )
        for group, ratio in means.get("best_peer_over_ours", {}).items():
            print(
                f"#   best peer / ours, {group} ({ratio['rows']} rows): geometric mean "
                f"{ratio['geometric_mean']:.2f}, worst {ratio['worst']:.2f} "
                f"({ratio['worst_case']})"
            )


def size_class(case: Case) -> str:
    """The kind of load that a case stands for."""
    if case.skewed or 8 < case.batch < 128:
        return "batch 9 to 127 and skewed"
    return "batch up to 8" if case.batch <= 8 else "batch 128 and more"


def against_peers(rows: dict[Case, dict[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """Best peer over ours, for all rows and by kind of load: geometric mean and worst row."""
    groups: dict[str, list[tuple[float, str]]] = {}
    for case, row in rows.items():
        if name in row["times"] and (ratio := best_peer_over_ours(row, name)):
            for group in ("all", size_class(case)):
                groups.setdefault(group, []).append((ratio, row["case"]))
    return {
        group: {
            "rows": len(ratios),
            "geometric_mean": _geometric_mean([ratio for ratio, _ in ratios]),
            "worst": min(ratios)[0],
            "worst_case": min(ratios)[1],
        }
        for group, ratios in groups.items()
    }

"""Prints the rows of bench_decode.py, their means and the bars."""

import dataclasses
from typing import Any

import bars
import numpy as np
import report
from grid import Case

COLUMNS = (
    ("case", "s"), ("implementation", "s"), ("us", ".1f"), ("kernels us", ".1f"),
    ("floor us", ".1f"), ("x floor", ".2f"), ("TB/s", ".3g"), ("TFLOP/s", ".3g"),
    ("doubling", "s"), ("spread", ".1%"), ("rel. error", ".1e"), ("peer / ours", ".2f"),
    ("recorded / ours", ".2f"),
)  # fmt: skip
_BAR_COLUMNS = (
    ("bar".ljust(52), "s"), ("reached", ".3g"), ("must", ".3g"), ("aim", ".3g"), ("met", "s"),
    ("rows", "d"), ("worst", ".3g"), ("worst row", "s"),
)  # fmt: skip


@dataclasses.dataclass
class Results:
    """Rows by case in the order of the run, rows left out for lack of time, and failures."""

    rows: dict[Case, dict[str, Any]] = dataclasses.field(default_factory=dict)
    left_out: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)

    def as_json(self, cases: list[Case]) -> dict[str, Any]:
        """Rows in the order of the grid."""
        rows = [self.rows[case] for case in cases if case in self.rows]
        return {"rows": rows, "left_out": self.left_out, "failed": self.failed}


def _doubling_text(entry: dict[str, Any]) -> str | None:
    """The difference between half and all of the calls, with a mark if it is too large."""
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
            entry["relative_error"], bars.best_peer_over_ours(row, name) if ours else None,
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
    return summary


def print_summary(summary: dict[str, Any]) -> None:
    """Print one line of means for each contender."""
    for name, means in summary.items():
        print(
            f"# {name}: geometric mean {means['over_floor']:.2f} x floor, "
            f"{means['time_over_first']:.2f} x the first, over {means['rows']} rows"
        )


def print_bars(reached: list[bars.Reached]) -> None:
    """Print a table of the bars and what the run reached."""
    table = report.Table(_BAR_COLUMNS)
    for bar in reached:
        met = None if bar.met is None else "yes" if bar.met else "NO"
        table.row([
            bar.name, bar.reached, bar.must, bar.aim, met, bar.rows, bar.worst, bar.worst_case,
        ])  # fmt: skip

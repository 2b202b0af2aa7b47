"""The rows of bench_decode.py as lines of its table, and their geometric means."""

from typing import Any

import numpy as np
import report

COLUMNS = (
    ("case", "s"), ("implementation", "s"), ("us", ".1f"), ("kernels us", ".1f"),
    ("floor us", ".1f"), ("x floor", ".2f"), ("TB/s", ".3g"), ("TFLOP/s", ".3g"),
    ("doubling", "s"), ("spread", ".1%"), ("rel. error", ".1e"), ("recorded / ours", ".2f"),
)  # fmt: skip


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
            entry["relative_error"], recorded_us / entry["us"] if recorded_us and ours else None,
        ])  # fmt: skip


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means by contender over the rows: time over floor, over the first's."""
    summary: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row["times"]):
        mine = [row for row in rows if name in row["times"]]
        over = [row["times"][name]["over_floor"] for row in mine]
        ratios = [
            row["times"][name]["us"] / next(iter(row["times"].values()))["us"] for row in mine
        ]
        summary[name] = {
            "rows": len(mine),
            "over_floor": float(np.exp(np.mean(np.log(over)))),
            "time_over_first": float(np.exp(np.mean(np.log(ratios)))),
        }
    return summary

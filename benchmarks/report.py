"""Reports a run: where it took place, its table, its JSON file and its plot."""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from roofline import Ceilings, Device

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def _output_of(*command: str) -> str | None:
    """The first line of a program's output; None where it is missing or fails."""
    try:
        result = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = result.stdout.strip().splitlines()
    return lines[0] if lines else ""


def environment(device: Device, ceilings: Ceilings | None = None) -> dict[str, Any]:
    """Return the facts that are needed to interpret a figure.

    Args:
      device: What the run used.
      ceilings: The rates behind the floor, if the run has one.

    Returns:
      A JSON-ready mapping.
    """
    on_gpu = device.platform in ("gpu", "cuda")
    query = "driver_version,power.limit,clocks.max.sm"
    smi = ("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    line = _output_of(*smi) if on_gpu else None
    driver, power, clock = [*(line or "").split(","), "", ""][:3]
    # The variable is for machines that have the files without their history, or with an older one.
    stated = os.environ.get("BENCHMARK_COMMIT")
    commit = stated or _output_of("git", "rev-parse", "HEAD")
    dirty = bool(_output_of("git", "status", "--porcelain", "-uno")) if commit else None
    facts: dict[str, Any] = {
        "commit": commit,
        "dirty": None if stated else dirty,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
        "device": device.device_kind if on_gpu else _cpu_name(),
        "num_devices": jax.device_count(),
        "driver": driver.strip() or None,
        "power_limit": power.strip() or None,
        "max_clock": clock.strip() or None,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }
    if ceilings is not None:
        facts["ceilings"] = {
            "from": ceilings.name,
            "tb_per_s": ceilings.bytes_per_s / 1e12,
            "tflop_per_s": ceilings.flops_per_s / 1e12,
        }
    return facts


def _cpu_name() -> str:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        if names:
            return f"{names[0]} x {len(names)}"
    return platform.processor() or "CPU"


def argument_parser(doc: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks; the description is the docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("the run")
    group.add_argument("--json", metavar="PATH", help="write all figures to this file, row by row")
    group.add_argument("--repeats", type=int, default=repeats, help="medians are reported")
    group.add_argument("--no-trace", action="store_true", help="do not profile the kernels' times")
    return parser


class Report:
    """Prints where a run takes place, and writes its JSON file."""

    def __init__(self, path: str | None, device: Device, ceilings: Ceilings | None = None) -> None:
        """Print the facts of the run.

        Args:
          path: Path of the JSON file, or None.
          device: What the run uses.
          ceilings: The rates behind the floor, if the run has one.
        """
        self.facts = environment(device, ceilings)
        self._path = path
        for key, value in self.facts.items():
            if value is not None:
                print(f"# {key}: {value}")

    def save(self, **content: Any) -> None:
        """Write facts and results. Call it after each row, so that an aborted run keeps them."""
        if self._path:
            path = pathlib.Path(self._path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"environment": self.facts, **content}, indent=1) + "\n")


class Table:
    """Prints rows of equal columns as they come, as a Markdown table."""

    def __init__(self, columns: Sequence[tuple[str, str]], write=print) -> None:
        """Print the head.

        Args:
          columns: (heading, format specification) of each column. A missing value prints "-".
          write: Prints one line. (The `write` of a progress bar keeps the bar in place.)
        """
        self._columns = columns
        self._write = write
        self._widths = [max(len(heading), 7, 15 * (spec == "s")) for heading, spec in columns]
        self._widths[0] = max(24, self._widths[0])
        self._line([heading for heading, _ in columns])
        self._line(["-" * width for width in self._widths])

    def _line(self, cells: Sequence[str]) -> None:
        padded = [
            cell.ljust(width) if spec == "s" else cell.rjust(width)
            for cell, width, (_, spec) in zip(cells, self._widths, self._columns, strict=True)
        ]
        self._write("| " + " | ".join(padded) + " |")

    def row(self, values: Sequence[Any]) -> None:
        """Print one row."""
        self._line(
            [
                "-" if value is None else format(value, spec)
                for value, (_, spec) in zip(values, self._columns, strict=True)
            ]
        )


def plot_over_floor(
    path: str | pathlib.Path, facts: Mapping[str, Any], rows: Sequence[dict]
) -> None:
    """Draw time over floor of every row and contender.

    Args:
      path: PNG file.
      facts: From `environment`.
      rows: As written to JSON: "case", "floor_us" and "times", a mapping of contender to its
      figures.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    rows = [row for row in rows if row.get("times")]
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    figure, axes = plt.subplots(figsize=(max(6.0, 0.27 * len(rows) + 2), 5.5), layout="constrained")
    for name, marker in zip(names, "os^Dv<>*PX" * (len(names) // 10 + 1), strict=False):
        points = [
            (i, row["times"][name]["us"] / row["floor_us"])
            for i, row in enumerate(rows)
            if name in row["times"]
        ]
        axes.plot(*zip(*points, strict=True), marker, label=name, markersize=5)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.set_ylabel("time / floor")
    axes.set_xticks(range(len(rows)), [row["case"] for row in rows], rotation=90, fontsize=7)
    axes.grid(True, axis="y", alpha=0.3)
    axes.legend()
    ceilings = facts.get("ceilings") or {}
    axes.set_title(
        f"{facts['device']}, jax {facts['jax']}, commit {str(facts['commit'])[:10]}\n"
        f"floor = max(bytes / {ceilings.get('tb_per_s', 0):.3g} TB/s, "
        f"operations / {ceilings.get('tflop_per_s', 0):.3g} TFLOP/s)",
        fontsize=9,
    )
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)

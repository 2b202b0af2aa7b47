"""What the benchmarks of one call share: options, set-up, how a row is timed and what it lacks."""

import argparse
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import contenders
import jax
import roofline
import timing
import workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `CallBench` reads, and the budget."""
    parser.add_argument(
        "--cache-mb", type=float, help="total of the rotating caches (GPU 400, CPU 128)"
    )
    parser.add_argument(
        "--dispatch-ms", type=float, help="least time of a dispatch (GPU 1.5, CPU 20)"
    )
    parser.add_argument("--tb-per-s", type=float, help="memory ceiling to use for the floor")
    parser.add_argument("--tflop-per-s", type=float, help="arithmetic ceiling to use for the floor")
    parser.add_argument("--budget-s", type=float, help="leave out rows not begun after this time")


def add_contenders(parser: argparse.ArgumentParser, peers: Sequence[ModuleType]) -> None:
    """Add the options that choose who is timed: our backends, and these peers."""
    parser.add_argument(
        "--backend",
        nargs="+",
        default=["auto"],
        help="backends of ours to time: auto, sm90, sm80, cpu, reference (default auto)",
    )
    names = [peer.NAME for peer in peers]
    parser.add_argument(
        "--peers",
        nargs="*",
        default=names,
        choices=names,
        help="torch packages to time in turn with ours where installed (default: all)",
    )


def timed_entry(contender: timing.Contender, sample: timing.Sample) -> dict[str, Any]:
    """Return the figures of a timed contender that need nothing but its sample."""
    return {
        "us": sample.seconds * 1e6,
        "spread": sample.spread,
        "calls_per_dispatch": contender.calls,
        "dispatches": sample.dispatches,
        "host_us_per_dispatch": sample.host_seconds * 1e6,
    }


def print_lacking(row: dict[str, Any], write: Callable[[str], Any] = print) -> None:
    """Say who does not serve a row, and whose results are wrong."""
    for name, reason in row["refused"].items():
        write(f"# {row['case']}: {name} does not serve it: {reason}")
    for name, reason in row["wrong"].items():
        write(f"# {row['case']}: {name} is WRONG and was not timed: {reason}")


class CallBench:
    """One run over a list of cases. A case is a call, timed over rotating caches."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Pick the device and its defaults."""
        self.args = args
        self.device = jax.devices()[0]
        self.on_gpu = self.device.platform in ("gpu", "cuda")
        self.ceilings = roofline.ceilings_for(
            self.device, tb_per_s=args.tb_per_s, tflop_per_s=args.tflop_per_s
        )
        self.cache_bytes = 1e6 * (args.cache_mb or (400 if self.on_gpu else 128))
        self.dispatch_seconds = 1e-3 * (args.dispatch_ms or (1.5 if self.on_gpu else 20))

    def begin_row(self, work: workload.Workload) -> tuple[dict[str, Any], float, int]:
        """Return the row of a case without its figures, its floor in seconds, calls a dispatch."""
        case = work.case
        floor = roofline.floor_seconds(case, self.ceilings)
        row: dict[str, Any] = {
            "case": case.label,
            "floor_us": floor * 1e6,
            "bytes": roofline.num_bytes(case),
            "flops": roofline.num_flops(case),
            "num_caches": work.num_caches,
            "times": {},
            "refused": {},
            "wrong": {},
        }
        calls = timing.calls_per_dispatch(
            work.num_caches, 1.1 * floor + 5e-6, min_seconds=self.dispatch_seconds
        )
        return row, floor, calls

    def time(self, timed: Sequence[timing.Contender], floor: float) -> list[timing.Sample]:
        """Time the contenders in turn."""
        return timing.time_in_turn(
            timed,
            repeats=self.args.repeats,
            min_seconds=timing.turn_seconds(floor, on_gpu=self.on_gpu),
            min_dispatches=8 if self.on_gpu else 2,
        )

    def add_traces(self, row: dict[str, Any], timed: Sequence[timing.Contender]) -> None:
        """Add the kernels' own times of JAX contenders that have been timed."""
        if not self.on_gpu or self.args.no_trace:
            return
        for contender in timed:
            device = self.device.local_hardware_id or 0
            row["times"][contender.name] |= contenders.trace(contender, device)


class PeerBench(CallBench):
    """A run that also times other implementations.

    Attributes:
      peers: what was timed of each, by name.
      missing: why each that could not be timed was not, on some rows at least.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """Begin without peers."""
        super().__init__(args)
        self.missing: dict[str, str] = {}
        self.peers: dict[str, str] = {}

    def print_peers(self, left_out: Sequence[str]) -> None:
        """Say which peers were timed, which were not, and which rows were left out."""
        for name, description in self.peers.items():
            print(f"# {name}: {description}")
        for name, reason in self.missing.items():
            print(f"# {name} not timed{' on some rows' * (name in self.peers)}: {reason}")
        if left_out:
            print(f"# left out after {self.args.budget_s:g} s: {', '.join(left_out)}")

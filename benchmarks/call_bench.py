"""What the benchmarks of one call share: options, set-up, and how a row is timed."""

import argparse
from collections.abc import Sequence
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

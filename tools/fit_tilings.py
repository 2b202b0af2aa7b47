r"""Fit the constants of csrc/decode/sm90/choice.cc to times on a GPU.

    python benchmarks/bench_decode.py --peers --no-check --no-doubling --json tilings.json \
        --backend sm90:narrow8 sm90:narrow16 sm90:narrow sm90:wide \
        --batch 1 2 4 8 16 32 --heads 40 64 96 128 --seq 256 1024 2048 4096 8192 16384 32768
    python tools/fit_tilings.py tilings.json

Prints each kernel's start, merge and block time with the residual, and by how much what the model
takes is slower than the best kernel. Calls of more than 32 rows only: `sm90:narrow` has 32-row
tiles there. The schedule is the one of csrc/decode/schedule.h for sequences of equal length.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import re

import numpy as np

BLOCK = 64  # tokens: kScheduleBlock
MANY_WORKERS = 66  # kManyWorkers
WIDE_ROWS = 64  # of the wide kernel's tile
BLOCK_TIMES = np.arange(0.5, 4.0, 0.05)
# Times this much slower than the best kernel's are never chosen: they need not fit.
WORST_RATIO = 1.7


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What choice.cc knows of a kernel before the fit."""

    rows: int
    memory_us: float
    seq_cost: int
    min_blocks: int


@dataclasses.dataclass(frozen=True)
class Constants:
    """What is fitted, and the relative residual."""

    start: float
    merge: float
    block: float
    residual: float


KERNELS = {
    "jax_mla sm90:narrow8": Kernel(8, 2.3, 1, 1),
    "jax_mla sm90:narrow16": Kernel(16, 2.3, 1, 1),
    "jax_mla sm90:narrow": Kernel(32, 2.3, 1, 1),
    "jax_mla sm90:wide": Kernel(64, 2.6, 2, 2),
}
Call = tuple[int, int, int]  # rows, batch, tokens


def work_of(kernel: Kernel, call: Call, num_sms: int) -> tuple[float, int, float]:
    """Share of the SMs that leave partial results, blocks a CTA, memory's time for a block."""
    rows, batch, tokens = call
    tiles = -(-rows // kernel.rows)
    blocks = -(-tokens // BLOCK)
    total = batch * blocks
    workers = min(max(num_sms // tiles, 1), total)
    slack_shift = 4 if kernel.rows < WIDE_ROWS else 1 if tiles == 1 else 2  # WideSlackShift
    least = kernel.min_blocks if kernel.min_blocks > 1 or total <= MANY_WORKERS else 2
    part = max(-(-(total + batch * kernel.seq_cost) // workers), kernel.seq_cost + least)
    cost = blocks + kernel.seq_cost
    if batch <= workers:
        even, ideal = -(-blocks // (workers // batch)), -(-total // workers)
        if even <= ideal + max(1, ideal >> slack_shift):
            part = max(even, least)
            cost = -(-blocks // part) * part
    else:
        even = -(-batch // workers) * cost
        part = even if even <= part + (part >> slack_shift) else part
    parts = min(workers, -(-batch * cost // part)) * tiles if part % cost else 0
    return parts / num_sms, min(part, total), kernel.memory_us / math.sqrt(tiles)


def estimate(kernel: Kernel, constants: Constants, call: Call, num_sms: int) -> float:
    """Microseconds of a call by the model."""
    share, blocks, memory = work_of(kernel, call, num_sms)
    return constants.start + constants.merge * share + max(constants.block, memory) * blocks


def fit(kernel: Kernel, times: dict[Call, float], num_sms: int) -> Constants:
    """The constants with the least relative squared error."""
    work = np.array([work_of(kernel, call, num_sms) for call in times])
    us = np.array(list(times.values()))
    best = Constants(0, 0, 0, math.inf)
    for block in BLOCK_TIMES:
        rest = us - np.maximum(block, work[:, 2]) * work[:, 1]
        columns = np.stack([np.ones_like(us), work[:, 0]], axis=1) / us[:, None]
        (start, merge), *_ = np.linalg.lstsq(columns, rest / us)
        residual = float(np.sqrt(np.mean((columns @ [start, merge] - rest / us) ** 2)))
        if residual < best.residual:
            best = Constants(float(start), float(merge), float(block), residual)
    return best


def read(path: pathlib.Path) -> dict[Call, dict[str, float]]:
    """Times by call and contender, from a report of bench_decode.py."""
    calls = {}
    for row in json.loads(path.read_text())["rows"]:
        label = re.fullmatch(r"b(\d+) s(\d+) h(\d+)(?: q(\d+))?", row["case"])
        if not label:
            continue
        batch, tokens, heads, q_len = (int(x or 1) for x in label.groups())
        times = {name: row["times"][name]["us"] for name in KERNELS if name in row["times"]}
        if times and heads * q_len > 32:
            calls[heads * q_len, batch, tokens] = times
    return calls


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description="Fit the constants of choice.cc.")
    parser.add_argument("report", type=pathlib.Path)
    parser.add_argument("--num-sms", type=int, default=132)
    args = parser.parse_args()
    calls = read(args.report)
    fitted = {}
    for name, kernel in KERNELS.items():
        times = {
            call: us[name]
            for call, us in calls.items()
            if name in us and us[name] <= WORST_RATIO * min(us.values())
        }
        if times:
            fitted[name] = fit(kernel, times, args.num_sms)
            print(f"{name}: {fitted[name]}")
    ratios = []
    for call, us in calls.items():
        chosen = min(us, key=lambda name: estimate(KERNELS[name], fitted[name], call, args.num_sms))
        ratios.append((us[chosen] / min(us.values()), call, chosen))
    print(f"chosen / best: mean {np.mean([r[0] for r in ratios]):.3f}; worst:")
    for ratio, call, chosen in sorted(ratios, reverse=True)[:10]:
        print(f"  {ratio:.3f} rows {call[0]}, {call[1]} x {call[2]}: {chosen}")


if __name__ == "__main__":
    main()

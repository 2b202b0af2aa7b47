r"""Fit the constants of csrc/decode/sm90/tuning.h to times on a GPU.

    python benchmarks/bench_decode.py --peers --no-check --no-doubling --json tilings.json \
        --backend sm90:narrow8 sm90:narrow16 sm90:wide \
        --batch 1 2 4 8 16 32 --heads 20 32 40 64 96 128 --seq 256 1024 2048 4096 8192 16384 32768
    python tools/fit_tilings.py tilings.json

Prints each kernel's start, merge, block and memory time with the residual, the same moved to where
the model's choices lose least, and by how much what it then takes is slower than the best kernel.
Calls of more than 16 rows only: the others do not go to the wide kernel. All calls of a report have
the same dims. The schedule is csrc/decode/schedule/schedule.h's, for sequences of equal length.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import re

import numpy as np

BLOCK = 64  # tokens: kScheduleBlock
MAX_SINGLE_BLOCKS = 66  # kMaxSingleBlocks
WIDE_ROWS = 64  # of the wide kernel's tile
ITEM_MERGES = 1.5  # kItemMerges
EXCHANGE_MERGE = 0.5  # kExchangeMerges
PARTS_PER_US = 128  # 1 / kPartUs
BLOCK_TIMES = np.arange(0.8, 2.2, 0.1)
MEMORY_TIMES = np.arange(1.8, 3.0, 0.1)
# Fitted are the calls, and of these the times, where a kernel has a rival: within this of the best.
RIVAL_RATIO = 1.25


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What tuning.h knows of a kernel before the fit."""

    rows: int
    seq_cost: int

    def slack(self, rows: int, batch: int, workers: int) -> tuple[int, int]:
        """NarrowSlack and WideSlack: blocks, shift."""
        if self.rows < WIDE_ROWS:
            return (6 if 2 * batch > workers else 1), 5
        if rows > WIDE_ROWS:
            return 6, 5
        return 5 + rows // 12, 3 if rows <= 32 else 2


@dataclasses.dataclass(frozen=True)
class Constants:
    """What is fitted, and the relative residual."""

    start: float
    merge: float
    block: float
    memory: float
    residual: float


KERNELS = {
    "jax_mla sm90:narrow8": Kernel(8, 1),
    "jax_mla sm90:narrow16": Kernel(16, 1),
    "jax_mla sm90:wide": Kernel(64, 2),
}
Call = tuple[int, int, int]  # rows, batch, tokens


@dataclasses.dataclass(frozen=True)
class Work:
    """What the schedule makes of a call."""

    parts_us: float  # kPartUs
    merges: float  # of full tiles: partial results of all SMs, and items after a CTA's first
    blocks: float  # of a CTA
    memory_share: float  # of the memory's time for a block


def work_of(kernel: Kernel, call: Call, num_sms: int) -> Work:
    """As EstimateUs in choice.cc."""
    rows, batch, tokens = call
    tiles = -(-rows // kernel.rows)
    blocks = -(-tokens // BLOCK)
    total = batch * blocks
    workers = min(max(num_sms // tiles, 1), total)
    is_clustered = kernel.rows == WIDE_ROWS and workers // batch == 2
    workers -= workers % 2 if is_clustered else 0
    slack_blocks, slack_shift = kernel.slack(rows, batch, max(num_sms // tiles, 1))
    least = 1 if total <= MAX_SINGLE_BLOCKS // (tiles if kernel.rows == WIDE_ROWS else 1) else 2
    queued = batch > workers
    step_cost = kernel.seq_cost if queued else 0
    step = max(-(-(blocks + step_cost) // (1 if queued else workers // batch)), least)
    even = step * (-(-batch // workers) if queued else 1)
    ideal = -(-(total + batch * step_cost) // workers)
    balanced = even > ideal + max(slack_blocks, 0 if queued else 1 + is_clustered) + (
        ideal >> slack_shift
    )
    if balanced:
        part = max(-(-(total + batch * kernel.seq_cost) // workers), kernel.seq_cost + least)
        seq = blocks + kernel.seq_cost
    else:
        part, seq = even, -(-blocks // step) * step
    splits = part % seq != 0
    busy = min(workers, -(-batch * seq // part)) * tiles / num_sms
    more_items = part / seq - 1 if not splits else part / seq if balanced else 0
    share = 0 if not splits else busy * EXCHANGE_MERGE if is_clustered and not balanced else busy
    return Work(
        blocks / part / PARTS_PER_US if splits else 0,
        (share + ITEM_MERGES * more_items) * -(-rows // tiles) / kernel.rows,
        min(part, total) if splits else part / seq * blocks,
        min(busy, 1) / math.sqrt(tiles),
    )


def estimate(constants: Constants, work: Work) -> float:
    """Microseconds of a call by the model."""
    block = max(constants.block, constants.memory * work.memory_share)
    fixed = constants.start + work.parts_us
    return fixed + constants.merge * work.merges + block * work.blocks


def fit(kernel: Kernel, times: dict[Call, float], num_sms: int) -> Constants:
    """The constants with the least relative squared error."""
    work = [work_of(kernel, call, num_sms) for call in times]
    merges, blocks, shares = np.array([[w.merges, w.blocks, w.memory_share] for w in work]).T
    us = np.array(list(times.values())) - [w.parts_us for w in work]
    columns = np.stack([np.ones_like(us), merges], axis=1) / us[:, None]
    best = Constants(0, 0, 0, 0, math.inf)
    for block, memory in itertools.product(BLOCK_TIMES, MEMORY_TIMES):
        rest = us - np.maximum(block, memory * shares) * blocks
        (start, merge), *_ = np.linalg.lstsq(columns, rest / us)
        residual = float(np.sqrt(np.mean((columns @ [start, merge] - rest / us) ** 2)))
        if residual < best.residual:
            best = Constants(float(start), float(merge), float(block), float(memory), residual)
    return best


def losses(
    fitted: dict[str, Constants],
    works: dict[Call, dict[str, Work]],
    calls: dict[Call, dict[str, float]],
) -> list[tuple[float, Call, str]]:
    """Of every call: the chosen kernel's time over the best one's, and which it is."""
    result = []
    for call, us in calls.items():
        chosen = min(us, key=lambda name: estimate(fitted[name], works[call][name]))
        result.append((us[chosen] / min(us.values()), call, chosen))
    return result


def refine(
    fitted: dict[str, Constants],
    works: dict[Call, dict[str, Work]],
    calls: dict[Call, dict[str, float]],
) -> dict[str, Constants]:
    """Move single constants by steps of 0.1 as long as the choices lose less on average.

    The fit wants every time to be right; what counts is which kernel is faster.
    """

    def mean_loss(constants: dict[str, Constants]) -> float:
        return float(np.mean([ratio for ratio, _, _ in losses(constants, works, calls)]))

    fields = ("start", "merge", "block", "memory")
    best = {
        name: dataclasses.replace(c, **{f: round(getattr(c, f), 1) for f in fields})
        for name, c in fitted.items()
    }
    least, improved = mean_loss(best), True
    while improved:
        improved = False
        for name, field, step in itertools.product(best, fields, (-0.2, -0.1, 0.1, 0.2)):
            value = round(getattr(best[name], field) + step, 1)
            tried = best | {name: dataclasses.replace(best[name], **{field: value})}
            if value > 0 and (loss := mean_loss(tried)) < least - 1e-6:
                best, least, improved = tried, loss, True
    return best


def read(path: pathlib.Path) -> dict[Call, dict[str, float]]:
    """Times by call and contender, from a report of bench_decode.py."""
    calls = {}
    for row in json.loads(path.read_text())["rows"]:
        label = re.fullmatch(r"b(\d+) s(\d+) h(\d+)(?: q(\d+))?(?: d\d+\+\d+)?", row["case"])
        if not label:
            continue
        batch, tokens, heads, q_len = (int(x or 1) for x in label.groups())
        times = {name: row["times"][name]["us"] for name in KERNELS if name in row["times"]}
        if times and heads * q_len > 16:
            calls[heads * q_len, batch, tokens] = times
    return calls


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description="Fit the constants of tuning.h.")
    parser.add_argument("report", type=pathlib.Path)
    parser.add_argument("--num-sms", type=int, default=132)
    args = parser.parse_args()
    calls = read(args.report)
    fitted = {}
    for name, kernel in KERNELS.items():
        times = {
            call: us[name]
            for call, us in calls.items()
            if name in us and sorted(us.values())[:2][-1] <= RIVAL_RATIO * min(us.values())
            if us[name] <= RIVAL_RATIO * min(us.values())
        }
        if times:
            fitted[name] = fit(kernel, times, args.num_sms)
            print(f"{name}: {fitted[name]}")
    works = {
        call: {name: work_of(KERNELS[name], call, args.num_sms) for name in us}
        for call, us in calls.items()
    }
    fitted = refine(fitted, works, calls)
    for name, constants in fitted.items():
        print(f"{name}, refined: {constants}")
    ratios = losses(fitted, works, calls)
    print(f"chosen / best: mean {np.mean([r[0] for r in ratios]):.3f}; worst:")
    for ratio, call, chosen in sorted(ratios, reverse=True)[:10]:
        print(f"  {ratio:.3f} rows {call[0]}, {call[1]} x {call[2]}: {chosen}")


if __name__ == "__main__":
    main()

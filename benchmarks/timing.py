"""Times contenders in turn, in steady state, on the wall clock; reads profiler traces."""

import collections
import dataclasses
import math
import pathlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import jax

# Dispatches of a short run: enough that the device does not wait for the host between them.
UNCOUNTED_DISPATCHES = 2
# Length of a contender's turn. The longer one is for calls that take HEAVY_SECONDS or more of a GPU
# by the roofline. They may reach the card's power limit. The clock then takes about 100 ms to
# settle, and until then it depends on which contender ran before.
TURN_SECONDS = 20e-3
HEAVY_TURN_SECONDS = 150e-3
HEAVY_SECONDS = 30e-6


class Contender(Protocol):
    """What can be timed: it enqueues dispatches, each of a fixed number of calls."""

    name: str

    @property
    def calls(self) -> int:
        """Calls in one dispatch."""
        ...

    def run(self, dispatches: int) -> float:
        """Enqueue that many dispatches and wait for all; return the host's share in seconds."""
        ...


@dataclasses.dataclass(frozen=True)
class Sample:
    """Result of `time_in_turn` for one contender.

    Attributes:
      seconds: Median time of one call in steady state.
      spread: (slowest - fastest) / median of the repeats.
      host_seconds: Median time of one dispatch until the host was free again.
      dispatches: Dispatches that one repeat counts.
    """

    seconds: float
    spread: float
    host_seconds: float
    dispatches: int


def time_in_turn(
    contenders: Sequence[Contender],
    *,
    repeats: int = 7,
    min_seconds: float = 20e-3,
    min_dispatches: int = 8,
) -> list[Sample]:
    """Time several contenders on the same card, one repeat of each in turn.

    They take turns because a card under load changes its clock within milliseconds, and contenders
    timed one after the other would meet different clocks. The order changes each time because the
    previous contender sets the clock that the next one starts with.

    Args:
      contenders: What is timed; already warm.
      repeats: Repeats of each; medians are returned.
      min_seconds: Dispatches are pipelined until one repeat takes about this long. (Nothing hides
        the start of the first one, 0.1 ms or more for a graph of hundreds of kernels.)
      min_dispatches: Fewest dispatches in flight.

    Returns:
      One sample a contender.
    """
    counts = []
    for contender in contenders:
        begin = time.perf_counter()
        contender.run(min_dispatches)
        once = (time.perf_counter() - begin) / min_dispatches
        counts.append(max(min_dispatches, min(1000, math.ceil(min_seconds / once))))
    totals: list[list[float]] = [[] for _ in contenders]
    hosts: list[list[float]] = [[] for _ in contenders]
    shuffled = random.Random(0)  # Repeatable.
    for _ in range(repeats):
        for i in shuffled.sample(range(len(contenders)), len(contenders)):
            begin = time.perf_counter()
            contenders[i].run(UNCOUNTED_DISPATCHES)
            middle = time.perf_counter()
            host = contenders[i].run(UNCOUNTED_DISPATCHES + counts[i])
            both = time.perf_counter() - middle
            counted = both - (middle - begin)
            if counted <= 0:  # other processes had the CPU during the first run
                counted = both * counts[i] / (UNCOUNTED_DISPATCHES + counts[i])
            totals[i].append(counted)
            hosts[i].append(host / (UNCOUNTED_DISPATCHES + counts[i]))
    samples = []
    for contender, total, host, count in zip(contenders, totals, hosts, counts, strict=True):
        median = statistics.median(total)
        samples.append(
            Sample(
                seconds=median / (count * contender.calls),
                spread=(max(total) - min(total)) / median,
                host_seconds=statistics.median(host),
                dispatches=count,
            )
        )
    return samples


def turn_seconds(floor_seconds: float, *, on_gpu: bool) -> float:
    """How long a turn of a call with this floor should last."""
    return HEAVY_TURN_SECONDS if on_gpu and floor_seconds > HEAVY_SECONDS else TURN_SECONDS


def calls_per_dispatch(caches: int, seconds_per_call: float, *, min_seconds: float) -> int:
    """How many calls one jitted function should hold: even, and a whole round of the caches.

    Args:
      caches: Caches to rotate over.
      seconds_per_call: An estimate; too low is harmless.
      min_seconds: Time that one dispatch should take, well above the host's time for it.
    """
    calls = max(caches, math.ceil(min_seconds / max(seconds_per_call, 1e-9)))
    return 2 * math.ceil(calls / 2)


@dataclasses.dataclass(frozen=True)
class KernelTimes:
    """A profiler trace of one dispatch.

    Attributes:
      busy_seconds: Time in which at least one kernel ran (overlaps counted once), over all streams.
      kernels: name -> (executions, seconds), longest first.
    """

    busy_seconds: float
    kernels: dict[str, tuple[int, float]]


Span = tuple[float, float, str]  # begin and end in nanoseconds, name


def trace_kernels(fn: Callable[[], object], *, device_index: int = 0) -> KernelTimes | None:
    """Run `fn` under JAX's profiler and read the kernels' own times on one GPU.

    Profiling switches XLA's command buffers off, so the gaps between kernels differ from those of
    an ordinary run. Only the kernels' own time is of use.

    Args:
      fn: Runs and waits for what is traced.
      device_index: Which GPU.

    Returns:
      The times, or None where the trace shows no kernel (on CPUs, or without CUPTI).
    """
    return summarize_spans(trace_spans(fn, device_index=device_index))


def trace_spans(fn: Callable[[], object], *, device_index: int = 0) -> list[Span]:
    """Like `trace_kernels`, with every execution of a kernel; empty without a trace."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            fn()
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        if not files:
            return []
        profile = jax.profiler.ProfileData.from_file(str(files[-1]))
        spans: list[Span] = []
        for plane in profile.planes:
            if plane.name != f"/device:GPU:{device_index}":
                continue
            for line in plane.lines:
                # Other lines ("XLA Ops", "Steps") repeat the same spans under other names.
                if line.name is None or not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    end = event.start_ns + event.duration_ns
                    spans.append((event.start_ns, end, event.name))
    return spans


def summarize_spans(spans: Sequence[Span]) -> KernelTimes | None:
    """Sum (begin, end, name) spans in nanoseconds: their union, and each name's total."""
    if not spans:
        return None
    busy, covered_until = 0.0, -math.inf
    kernels: dict[str, list[float]] = collections.defaultdict(list)
    for begin, end, name in sorted(spans):
        busy += max(0.0, end - max(begin, covered_until))
        covered_until = max(covered_until, end)
        kernels[name].append(end - begin)
    ordered = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return KernelTimes(
        busy_seconds=busy * 1e-9,
        kernels={name: (len(spans), sum(spans) * 1e-9) for name, spans in ordered},
    )

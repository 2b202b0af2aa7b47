"""Turn a dump of tools/decode_trace.cu into a Perfetto file, a table or a picture.

    python tools/trace_to_perfetto.py DUMP [--json OUT.json] [--png OUT.png] [--sms 0,1]

The JSON opens in ui.perfetto.dev or chrome://tracing: one process an SM, one thread a warp. Printed
is the median duration of every phase, by role. Needs the standard library alone, and matplotlib for
--png.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import statistics
import struct
from typing import Any

# Header and Event of csrc/gpu/trace.cuh.
HEADER = struct.Struct("<QQQQIIIHH")
EVENT = struct.Struct("<II")
CLOCK_BITS = 32
# Colours of the picture. Waiting for other warps or for memory is pale; other phases share FILL.
WAIT_COLOR = "#e6e6e6"
MMA_COLOR = "#c3cfe2"
FILL = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#9d755d")
FILL += ("#1f9e89", "#ff9da6", "#79706e", "#6f4e9c")
MAX_COMBINE_ROWS = 4  # of an SM


@dataclasses.dataclass(frozen=True)
class Track:
    """What one warp did. `phases` are (name, first cycle, end cycle) of its SM's counter."""

    role: str
    sm: int
    cta: int
    warp: int
    clocks: tuple[tuple[int, int], tuple[int, int]]  # (cycle, ns) of begin and end
    phases: list[tuple[str, int, int]]


@dataclasses.dataclass(frozen=True)
class Trace:
    """One decode call."""

    call: str
    phase_names: list[str]
    tracks: list[Track]
    cycles_per_ns: float
    origins: dict[int, tuple[int, float]]  # SM -> a cycle, and its time in ns

    def ns(self, sm: int, cycle: int) -> float:
        """Time of a cycle, in ns since some point that all SMs share."""
        origin_cycle, origin_ns = self.origins[sm]
        return origin_ns + (cycle - origin_cycle) / self.cycles_per_ns


def fit_clocks(tracks: list[Track]) -> tuple[float, dict[int, tuple[int, float]]]:
    """The SMs' clock rate, and for each SM the time of one cycle.

    The GPU's nanoseconds advance in steps of 32 or more, so they are averaged over all warps. They
    count from 1970: the differences are taken before floats lose them.
    """
    spans = [t.clocks for t in tracks]
    ns = sum(end[1] - begin[1] for begin, end in spans)
    rate = sum(end[0] - begin[0] for begin, end in spans) / ns if ns else 1.0
    first_ns = min(begin[1] for begin, _ in spans)
    clocks_of = collections.defaultdict(list)
    for track in tracks:
        clocks_of[track.sm] += track.clocks
    origins = {}
    for sm, clocks in clocks_of.items():
        origin = clocks[0][0]
        times = [ns - first_ns - (cycle - origin) / rate for cycle, ns in clocks]
        origins[sm] = (origin, statistics.fmean(times))
    return rate, origins


def read_dump(path: pathlib.Path) -> Trace:
    """Parse a dump."""
    line, _, data = path.read_bytes().partition(b"\n")
    about = json.loads(line)
    tracks = []
    offset = 0
    while offset < len(data):
        *clocks, num_events, sm, cta, warp, role = HEADER.unpack_from(data, offset)
        begin_clock, begin_ns, end_clock, end_ns = clocks
        offset += HEADER.size
        events = list(EVENT.iter_unpack(data[offset : offset + num_events * EVENT.size]))
        offset += num_events * EVENT.size
        cycle = begin_clock
        marks = []
        for low, phase in events:
            cycle += (low - cycle) % (1 << CLOCK_BITS)
            marks.append((about["phases"][phase], cycle))
        ends = [cycle for _, cycle in marks[1:]] + [end_clock]
        phases = [(name, start, end) for (name, start), end in zip(marks, ends, strict=True)]
        span = ((begin_clock, begin_ns), (end_clock, end_ns))
        tracks.append(Track(about["roles"][role], sm, cta, warp, span, phases))
    tracks.sort(key=lambda t: (t.sm, t.role == "combine", t.cta, t.warp))
    return Trace(about["call"], about["phases"], tracks, *fit_clocks(tracks))


def to_perfetto(trace: Trace) -> dict[str, Any]:
    """Chrome's trace event format, which Perfetto reads."""
    start = min(trace.ns(t.sm, t.phases[0][1]) for t in trace.tracks)
    events: list[dict[str, Any]] = []
    for sm in sorted({t.sm for t in trace.tracks}):
        events.append({"ph": "M", "name": "process_name", "pid": sm, "args": {"name": f"SM {sm}"}})
    for tid, track in enumerate(trace.tracks):
        where = {"pid": track.sm, "tid": tid}
        name = f"{track.role}, warp {track.warp}, CTA {track.cta}"
        events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
        events.append(
            {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": tid}}
        )
        for phase, begin, end in track.phases:
            begin_us = (trace.ns(track.sm, begin) - start) / 1e3
            duration_us = (end - begin) / trace.cycles_per_ns / 1e3
            events.append(
                {
                    "ph": "X",
                    "name": phase,
                    "cat": track.role,
                    **where,
                    "ts": round(begin_us, 4),
                    "dur": round(duration_us, 4),
                    "args": {"cycles": end - begin},
                }
            )
    return {"displayTimeUnit": "ns", "otherData": {"call": trace.call}, "traceEvents": events}


def summarise(trace: Trace) -> str:
    """A table: median duration of every phase, and its share of the role's time."""
    durations = collections.defaultdict(list)
    num_warps = collections.Counter(t.role for t in trace.tracks)
    total = collections.Counter()
    for track in trace.tracks:
        for phase, begin, end in track.phases:
            durations[track.role, phase].append(end - begin)
            total[track.role] += end - begin
    mhz = trace.cycles_per_ns * 1e3
    lines = [f"{trace.call}; SM clock {mhz:.0f} MHz", ""]
    lines.append("| role | phase | a warp | median cycles | median us | 90 % us | share |")
    lines.append("|---|---|---|---|---|---|---|")
    for (role, phase), cycles in durations.items():
        median = statistics.median(cycles)
        high = sorted(cycles)[len(cycles) * 9 // 10]
        lines.append(
            f"| {role} | {phase} | {len(cycles) / num_warps[role]:.1f} | {median:.0f} "
            f"| {median / mhz:.2f} | {high / mhz:.2f} | {sum(cycles) / total[role]:.0%} |"
        )
    return "\n".join(lines)


def picked_tracks(trace: Trace, sms: list[int]) -> list[Track]:
    """What the picture shows of each SM: the first warp of every role of every CTA."""
    shown, seen = [], set()
    num_combine = collections.Counter()
    for track in trace.tracks:
        key = (track.sm, track.cta, track.role)
        if track.sm not in sms or track.role == "helper" or key in seen:
            continue
        seen.add(key)
        num_combine[track.sm] += track.role == "combine"
        if track.role != "combine" or num_combine[track.sm] <= MAX_COMBINE_ROWS:
            shown.append(track)
    return shown


def phase_colors(trace: Trace) -> dict[str, str]:
    """Colour of every phase, the same in all pictures of one build."""
    fills = itertools.cycle(FILL)
    colors = {}
    for name in trace.phase_names:
        is_wait = name.startswith(("wait", "start"))
        colors[name] = WAIT_COLOR if is_wait else next(fills)
    return colors | {"wait for MMA": MMA_COLOR}


def draw(trace: Trace, sms: list[int], window_us: float, path: pathlib.Path) -> None:
    """Draw the first warp of every role on these SMs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    tracks = picked_tracks(trace, sms)
    start = min(trace.ns(t.sm, t.phases[0][1]) for t in tracks)
    colors = phase_colors(trace)
    figure, axes = pyplot.subplots(figsize=(13, 1.6 + 0.34 * len(tracks)), layout="constrained")
    for row, track in enumerate(tracks):
        for phase, begin, end in track.phases:
            left = (trace.ns(track.sm, begin) - start) / 1e3
            width = (end - begin) / trace.cycles_per_ns / 1e3
            style = {"facecolor": colors[phase], "linewidth": 0}
            axes.broken_barh([(left, width)], (row - 0.42, 0.84), **style)
    axes.set_yticks(range(len(tracks)), [f"SM {t.sm} {t.role}" for t in tracks])
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.set_xlim(0, window_us or None)
    axes.set_xlabel("us")
    axes.set_title(trace.call, fontsize=10)
    used = {phase for track in tracks for phase, _, _ in track.phases}
    named = [n for n in trace.phase_names if n in used and colors[n] != WAIT_COLOR]
    handles = [Patch(color=colors[n], label="MMA" if n == "wait for MMA" else n) for n in named]
    handles.append(Patch(color=WAIT_COLOR, label="wait"))
    figure.legend(handles=handles, ncols=15, fontsize=8, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("dump", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, help="write a Perfetto file")
    parser.add_argument("--png", type=pathlib.Path, help="draw a picture")
    parser.add_argument(
        "--sms", default="", help="of the picture, comma-separated; default: the first"
    )
    parser.add_argument("--us", type=float, default=0.0, help="of the picture; default: all")
    args = parser.parse_args()
    trace = read_dump(args.dump)
    print(summarise(trace))
    if args.json:
        args.json.write_text(json.dumps(to_perfetto(trace), separators=(",", ":")))
    if args.png:
        sms = [int(sm) for sm in args.sms.split(",") if sm] or [trace.tracks[0].sm]
        draw(trace, sms, args.us, args.png)


if __name__ == "__main__":
    main()

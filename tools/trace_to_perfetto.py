"""Turn a dump of tools/decode_trace.cu into a Perfetto file, a table or a picture.

    python tools/trace_to_perfetto.py DUMP [--json OUT.json] [--png OUT.png] [--sms 0,1]

The JSON opens in ui.perfetto.dev or chrome://tracing: one process an SM, one thread a warp. Printed
is the median duration of every phase, by role. Needs the standard library alone, and matplotlib for
--png.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import statistics
import struct
from typing import Any

# Header and Event of csrc/gpu/trace.cuh.
HEADER = struct.Struct("<QQQQIIIHH")
EVENT = struct.Struct("<II")
CLOCK_BITS = 32
# Colours of the picture: waits are pale.
WAIT_COLOR = "#e4e4e4"
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#eeca3b", "#b279a2", "#9d755d")


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
    tracks: list[Track]
    cycles_per_ns: float
    sm_zero_ns: dict[int, float]  # when an SM's counter was 0

    def ns(self, sm: int, cycle: int) -> float:
        """Time of a cycle, in ns since some point that all SMs share."""
        return self.sm_zero_ns[sm] + cycle / self.cycles_per_ns


def fit_clocks(tracks: list[Track]) -> tuple[float, dict[int, float]]:
    """The SMs' clock rate, and for each SM when its counter was 0.

    The GPU's nanoseconds advance in steps of 32 or more, so they are averaged over all warps.
    """
    cycles = sum(end[0] - begin[0] for begin, end in (t.clocks for t in tracks))
    ns = sum(end[1] - begin[1] for begin, end in (t.clocks for t in tracks))
    rate = cycles / ns if ns else 1.0
    zeros = collections.defaultdict(list)
    for track in tracks:
        zeros[track.sm] += [ns - cycle / rate for cycle, ns in track.clocks]
    return rate, {sm: statistics.fmean(values) for sm, values in zeros.items()}


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
    return Trace(about["call"], tracks, *fit_clocks(tracks))


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
    for track in trace.tracks:
        key = (track.sm, track.cta, track.role)
        if track.sm in sms and track.role != "helper" and key not in seen:
            seen.add(key)
            shown.append(track)
    return shown


def draw(trace: Trace, sms: list[int], window_us: float, path: pathlib.Path) -> None:
    """Draw the first warp of every role on these SMs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    tracks = picked_tracks(trace, sms)
    start = min(trace.ns(t.sm, t.phases[0][1]) for t in tracks)
    works = sorted(
        {p for t in tracks for p, _, _ in t.phases if not p.startswith(("wait", "start"))}
    )
    color = {name: COLORS[i % len(COLORS)] for i, name in enumerate(works)}
    figure, axes = pyplot.subplots(figsize=(13, 1.3 + 0.32 * len(tracks)), layout="constrained")
    for row, track in enumerate(tracks):
        for phase, begin, end in track.phases:
            left = (trace.ns(track.sm, begin) - start) / 1e3
            width = (end - begin) / trace.cycles_per_ns / 1e3
            face = color.get(phase, WAIT_COLOR)
            axes.barh(
                row, width, left=left, height=0.8, color=face, edgecolor="white", linewidth=0.3
            )
    axes.set_yticks(range(len(tracks)), [f"SM {t.sm} {t.role}" for t in tracks])
    axes.invert_yaxis()
    axes.set_xlim(0, window_us or None)
    axes.set_xlabel("us")
    axes.set_title(trace.call, fontsize=10)
    handles = [Patch(color=color[name], label=name) for name in works]
    handles.append(Patch(color=WAIT_COLOR, label="wait"))
    axes.legend(
        handles=handles,
        ncols=len(handles),
        fontsize=8,
        loc="lower right",
        bbox_to_anchor=(1, -0.02),
        frameon=False,
    )
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

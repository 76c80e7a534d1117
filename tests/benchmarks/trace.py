"""What a torch profile of a step says of overlap: which part of the copies ran beside kernels, and when nothing did.

Pure but for reading and drawing files. A trace is Chrome's JSON, as `torch.profiler` exports it; Perfetto opens it.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Span = tuple[float, float]  # (start, stop), microseconds
DIRECTIONS = {"HtoD": "swap_in", "DtoH": "swap_out", "DtoD": "inside"}
LEAST_BYTES = 1 << 20  # a copy below this is a scalar on its way, not a transfer


@dataclass(frozen=True)
class Lanes:
    """When kernels ran and when copies did, by direction; each in order and merged where they touch."""

    kernels: tuple[Span, ...]
    copies: dict[str, tuple[Span, ...]]
    nbytes: dict[str, int]

    @property
    def window(self) -> Span:
        every = [*self.kernels, *(span for spans in self.copies.values() for span in spans)]
        return (min(start for start, _ in every), max(stop for _, stop in every)) if every else (0.0, 0.0)


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, compressed or not."""
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
    with opened as file:
        return json.load(file)["traceEvents"]


def lanes(events: Iterable[dict[str, Any]]) -> Lanes:
    """Kernels and copies of one device. An event without a duration, or of the host, is not looked at."""
    kernels: list[Span] = []
    copies: dict[str, list[Span]] = {}
    nbytes: dict[str, int] = {}
    for event in events:
        if event.get("ph") != "X" or "dur" not in event:
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy":
            size = int(event.get("args", {}).get("bytes", LEAST_BYTES))
            lane = next((name for word, name in DIRECTIONS.items() if word in event.get("name", "")), None)
            if lane is None or size < LEAST_BYTES:
                continue
            copies.setdefault(lane, []).append(span)
            nbytes[lane] = nbytes.get(lane, 0) + size
    return Lanes(merged(kernels), {lane: merged(spans) for lane, spans in copies.items()}, nbytes)


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same time as spans that neither touch nor overlap, in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def seconds(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans) / 1e6


def common(first: Sequence[Span], second: Sequence[Span]) -> tuple[Span, ...]:
    """The time that is in both; each is merged."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            found.append((start, stop))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def overlap(found: Lanes) -> dict[str, Any]:
    """By direction: seconds, GB/s while copying, and the fraction of that time beside a kernel.

    And of the whole: seconds of kernels, and those in which none ran.
    """
    start, stop = found.window
    answer: dict[str, Any] = {
        "window_seconds": (stop - start) / 1e6,
        "kernel_seconds": seconds(found.kernels),
        "idle_seconds": (stop - start) / 1e6 - seconds(found.kernels),
    }
    for lane, spans in found.copies.items():
        busy = seconds(spans)
        answer[lane] = {
            "seconds": busy,
            "gbps": found.nbytes[lane] / busy / 1e9 if busy else 0.0,
            "beside_kernels": seconds(common(spans, found.kernels)) / busy if busy else 1.0,
        }
    return answer


def draw(found: Lanes, path: Path, title: str) -> None:
    """A row for kernels and one for each direction, over the window's milliseconds."""
    from matplotlib.figure import Figure

    colours = {"kernels": "#4c72b0", "swap_in": "#55a868", "swap_out": "#c44e52", "inside": "#8c8c8c"}
    rows = {"kernels": found.kernels, **{lane: found.copies[lane] for lane in sorted(found.copies)}}
    begin, end = found.window
    figure = Figure(figsize=(12, 1.5 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, (lane, spans) in enumerate(rows.items()):
        bars = [((start - begin) / 1e3, (stop - start) / 1e3) for start, stop in spans]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colours[lane])
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(title=title, xlabel="milliseconds", xlim=(0, max(1e-3, (end - begin) / 1e3)))
    axes.invert_yaxis()
    figure.savefig(path, dpi=110)

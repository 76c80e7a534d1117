"""Records what ran when, as Chrome-trace JSON that Perfetto and chrome://tracing open.

Owns the record of spans and transfers; it is a zero-core `Observer`. It draws nothing and decides nothing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Event:
    """One span on a thread, or one transfer (`lane` names its track) between submission and observed completion."""

    kind: str  # "gather", "part", "reduce", "wait", "update", "swap_in", "swap_out", "norm"
    unit: str  # of a part with its rows: "layers.0 2:4"
    start_ns: int  # time.perf_counter_ns
    stop_ns: int
    lane: str  # thread name, or "read" / "write" for transfers that run beside all threads
    overlapping: bool = False
    nbytes: int = 0


class Timeline:
    """Keeps the last `capacity` events; about a microsecond each.

    >>> with timeline.span("compute", "layers.0"): ...
    >>> timeline.save("step.json")
    """

    def __init__(self, capacity: int = 1 << 16, *, rank: int = 0) -> None:
        self.rank = rank
        self.enabled = True
        self._events: deque[Event] = deque(maxlen=capacity)

    @contextmanager
    def span(self, kind: str, unit: str) -> Iterator[None]:
        """Records the time that the calling thread spends inside. Under torch's profiler it is also a range there."""
        start = time.perf_counter_ns()
        try:
            if torch.autograd._profiler_enabled():
                with torch.autograd.profiler.record_function(f"zero::{kind}::{unit}"):
                    yield
            else:
                yield
        finally:
            self._add(Event(kind, unit, start, time.perf_counter_ns(), threading.current_thread().name))

    def transfer(self, kind: str, unit: str, start_ns: int, stop_ns: int, nbytes: int) -> None:
        """Records a transfer, from its submission until it was first seen complete (time.perf_counter_ns)."""
        lane = "read" if kind == "swap_in" else "write"
        self._add(Event(kind, unit, start_ns, stop_ns, lane, overlapping=True, nbytes=nbytes))

    def of_rank(self, rank: int) -> None:
        """Sets the rank in the trace."""
        self.rank = rank

    def _add(self, event: Event) -> None:
        if self.enabled:
            self._events.append(event)  # deque.append is atomic

    def events(self) -> tuple[Event, ...]:
        """The kept events, in the order in which they ended."""
        return tuple(self._events)

    def clear(self) -> None:
        """Drops all events."""
        self._events.clear()

    def seconds(self) -> Mapping[str, float]:
        """Sum of durations by kind. Transfers overlap, so theirs may exceed the time that passed."""
        sums: dict[str, float] = {}
        for event in self.events():
            sums[event.kind] = sums.get(event.kind, 0.0) + (event.stop_ns - event.start_ns) / 1e9
        return sums

    def trace(self) -> dict[str, Any]:
        """The Chrome trace: "X" events by thread, "b"/"e" pairs for transfers, names as metadata. Microseconds."""
        lanes: dict[str, int] = {}
        records: list[dict[str, Any]] = []
        for number, event in enumerate(self.events()):
            lane = lanes.setdefault(event.lane, len(lanes) + 1)
            record: dict[str, Any] = {
                "name": f"{event.kind} {event.unit}".strip(),
                "cat": event.kind,
                "ts": event.start_ns / 1e3,
                "pid": self.rank,
                "tid": lane,
                "args": {"unit": event.unit} | ({"bytes": event.nbytes} if event.overlapping else {}),
            }
            if event.overlapping:
                end = {"ph": "e", "id": number, "ts": event.stop_ns / 1e3}
                records += [record | {"ph": "b", "id": number}, record | end]
            else:
                records.append(record | {"ph": "X", "dur": (event.stop_ns - event.start_ns) / 1e3})
        names = [
            {"name": "thread_name", "ph": "M", "pid": self.rank, "tid": tid, "args": {"name": lane}}
            for lane, tid in lanes.items()
        ]
        names.append({"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}})
        return {"traceEvents": names + records, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace. The file is complete or absent."""
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(json.dumps(self.trace()))
        partial.replace(target)

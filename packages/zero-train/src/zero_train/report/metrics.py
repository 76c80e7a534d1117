"""Measures the steps of a run, and reads and writes whole files of its folder. Shows nothing and draws nothing."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COUNTED = ("exposed_seconds", "nvme_read_bytes", "nvme_write_bytes")  # of a store, by their names in metrics.jsonl
HELD = ("host_bytes", "device_bytes", "nvme_bytes")


@dataclass(frozen=True)
class Step:
    """One line of metrics.jsonl. The counters of the last step include the update that others run in the background."""

    step: int  # from 1
    loss: float  # nats a byte, mean over ranks and micro-batches
    grad_norm: float  # before clipping
    learning_rate: float
    step_seconds: float
    tokens_per_second: float  # of all ranks
    exposed_seconds: float  # time that overlap did not hide
    nvme_read_bytes: int
    nvme_write_bytes: int
    host_bytes: int
    device_bytes: int
    peak_rss_bytes: int  # VmHWM since the process began
    nvme_bytes: int = 0  # reserved on the drives


@dataclass
class History:
    """The measurements of a run so far."""

    steps: list[Step] = field(default_factory=list)
    phases: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # (step, seconds by the phase's name)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (after step, nats a byte)
    remarks: list[str] = field(default_factory=list)  # on the data, for the report


class Meter:
    """Measures the steps of an assemble.Assembled, for its timeline and for `history`."""

    def __init__(self, engine: Any, history: History) -> None:
        self._engine, self._history = engine, history
        self._usage, self._measured = engine.usage(), dict[str, Any]()
        self._phases: dict[str, float] | None = None  # seconds of the training thread in this step; None: outside

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Measures step `number`, which runs inside the `with` block."""
        phases = self._phases = defaultdict[str, float](float)
        begun = time.perf_counter()
        try:
            with self._engine.timeline.span("step", str(number)):
                yield
        finally:
            self._phases = None
        seconds = time.perf_counter() - begun
        before, self._usage = self._usage, self._engine.usage()
        since = {name: self._usage[name] - before[name] for name in COUNTED}
        self._measured = {"step": number, "step_seconds": seconds, **self._usage, **since}
        self._history.phases.append((number, phases))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of a step. Outside of a step, as in an evaluation, it does nothing."""
        if self._phases is None:
            yield
            return
        begun = time.perf_counter()
        with self._engine.timeline.span(name, ""):
            yield
        self._phases[name] += time.perf_counter() - begun

    def line(self, tokens: float, **figures: float) -> Step:
        """Adds the step that has ended to the history, and returns it. `tokens` are those of all ranks."""
        rate = tokens / self._measured["step_seconds"]
        measured = {**self._measured, **figures, "tokens_per_second": rate, "peak_rss_bytes": peak_rss_bytes()}
        self._history.steps.append(Step(**measured))
        return self._history.steps[-1]


def peak_rss_bytes() -> int:
    """Returns the largest resident set of this process so far, VmHWM of /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def replace(path: Path, text: str) -> None:
    """Writes a file so that after a kill it holds either all of `text` or its earlier content."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def records(path: Path) -> list[dict[str, Any]]:
    """Returns the complete records of a file. A killed run may have left half a line at the end."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found

"""What a run says while it goes: a bar on a terminal, plain lines elsewhere, nothing on ranks other than the first."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@dataclass(frozen=True)
class Line:
    """One step as people read it."""

    step: int
    loss: float
    tokens_per_second: float
    exposed_seconds: float  # of this step: what overlap did not hide

    def __str__(self) -> str:
        exposed = f"exposed {self.exposed_seconds * 1000:.0f} ms"
        return f"loss {self.loss:.4f}  {self.tokens_per_second:,.0f} tokens/s  {exposed}"


class Reporter(Protocol):
    """A context manager that shows steps and sentences."""

    def __enter__(self) -> Reporter: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def step(self, line: Line) -> None: ...
    def say(self, text: str) -> None: ...


class Silent:
    """For the ranks that do not print."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, line: Line) -> None:
        """Shows nothing."""

    def say(self, text: str) -> None:
        """Shows nothing."""


class Plain:
    """A line every `every` steps, and at the last: for files and pipes."""

    def __init__(self, steps: int, every: int, out: TextIO) -> None:
        self._steps, self._every, self._out = steps, max(every, 1), out
        self._begun = time.monotonic()

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, line: Line) -> None:
        """Prints one line, where it is due."""
        if line.step % self._every == 0 or line.step in (1, self._steps):
            self.say(f"step {line.step}/{self._steps}  {line}  {time.monotonic() - self._begun:.0f} s")

    def say(self, text: str) -> None:
        """Prints `text` at once, through a pipe too."""
        self._out.write(text + "\n")
        self._out.flush()


class Bar:
    """rich's progress bar with the step's figures beside it."""

    def __init__(self, steps: int, done: int, out: TextIO) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
            console=Console(file=out),
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("training", total=steps, completed=done, line="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, line: Line) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=line.step, line=str(line))

    def say(self, text: str) -> None:
        """Prints `text` above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)


def reporter(
    leader: bool, steps: int, done: int, every: int, bar: bool | None = None, out: TextIO | None = None
) -> Reporter:
    """The one that fits where `out` (standard output) leads; `bar` says it instead where it is not None."""
    out = out or sys.stdout
    if not leader:
        return Silent()
    return Bar(steps, done, out) if (out.isatty() if bar is None else bar) else Plain(steps, every, out)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as aligned text: the first row is the heading, the first column is left-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(widths[0]) if column == 0 else cell.rjust(widths[column]) for column, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

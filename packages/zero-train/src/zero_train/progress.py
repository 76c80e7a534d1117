"""Shows how a run proceeds: a bar on a terminal, plain lines elsewhere, nothing on ranks other than the first."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zero_train.loop import Step


class Reporter:
    """A context manager that is told of steps and sentences. This one shows nothing; the others subclass it."""

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, step: Step) -> None:
        """Shows one step."""

    def say(self, text: str) -> None:
        """Shows a sentence."""


class Plain(Reporter):
    """Prints the first step, every `every`-th step and the last one, for files and pipes."""

    def __init__(self, steps: int, every: int, out: TextIO) -> None:
        self._steps, self._every, self._out = steps, max(every, 1), out
        self._begun = time.monotonic()

    def step(self, step: Step) -> None:
        """Prints one line if it is due."""
        if step.step % self._every == 0 or step.step in (1, self._steps):
            self.say(f"step {step.step}/{self._steps}  {_figures(step)}  {time.monotonic() - self._begun:.0f} s")

    def say(self, text: str) -> None:
        """Prints `text` and flushes, so that a pipe delivers it at once."""
        print(text, file=self._out, flush=True)


class Bar(Reporter):
    """Shows rich's progress bar with the figures of the last step beside it."""

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

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, step: Step) -> None:
        """Moves the bar."""
        self._progress.update(self._task, completed=step.step, line=_figures(step))

    def say(self, text: str) -> None:
        """Prints `text` above the bar."""
        self._progress.console.print(text, markup=False, highlight=False)


def reporter(
    leader: bool, steps: int, done: int, every: int, bar: bool | None = None, out: TextIO | None = None
) -> Reporter:
    """Returns the reporter that suits `out` (default: standard output). `bar` overrides that unless it is None."""
    out = out or sys.stdout
    if not leader:
        return Reporter()
    return Bar(steps, done, out) if (out.isatty() if bar is None else bar) else Plain(steps, every, out)


def _figures(step: Step) -> str:
    exposed = f"exposed {step.exposed_seconds * 1000:.0f} ms"
    return f"loss {step.loss:.4f}  {step.tokens_per_second:,.0f} tokens/s  {exposed}"

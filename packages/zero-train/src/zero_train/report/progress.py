"""Reports a run's figures: writes metrics.jsonl and validation.jsonl, and shows a bar or lines on the terminal."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zero_train.report.metrics import Step, records, replace
from zero_train.schema import RunConfig


def say(text: str) -> None:
    """Prints `text`, above the bar if there is one, and flushes, so that a pipe delivers it at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Told(ExitStack):
    """Receives the steps and validation losses of a run. Only the first rank writes and shows them.

    Each line of a file is flushed when its step is over. A resumed run keeps the lines before its next step and drops
    the others. The terminal gets rich's bar, or plain lines: the first step, every run.report_every-th one and the
    last.
    """

    def __init__(self, folder: Path, run: RunConfig, done: int, leader: bool) -> None:
        """done: steps that the run has taken before."""
        super().__init__()
        self._run, self._leader, self._begun = run, leader, time.monotonic()
        self._files: dict[str, Any] = {}
        self._bar: Progress | None = None
        for name in ("metrics", "validation") if leader else ():
            path = folder / f"{name}.jsonl"
            kept = [line for line in records(path) if line["step"] <= done]
            replace(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._files[name] = self.enter_context(path.open("a"))
        if leader and (sys.stdout.isatty() if run.bar is None else run.bar):
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = self.enter_context(Progress(*columns, refresh_per_second=4))
            self._bar.add_task("", total=run.steps, completed=done)

    def step(self, step: Step) -> None:
        """Reports one step."""
        if not self._leader:
            return
        self._write("metrics", dataclasses.asdict(step))
        exposed = f"exposed {step.exposed_seconds * 1000:.0f} ms"
        figures = f"loss {step.loss:.4f}  {step.tokens_per_second:,.0f} tokens/s  {exposed}"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step.step, description=figures)
        elif step.step % self._run.report_every == 0 or step.step in (1, self._run.steps):
            say(f"step {step.step}/{self._run.steps}  {figures}  {time.monotonic() - self._begun:.0f} s")

    def validation(self, number: int, loss: float, unit: str, accuracy: float | None = None) -> None:
        """Reports the validation loss after step `number`, and the share of pairs that are ranked right."""
        if not self._leader:
            return
        more = {} if accuracy is None else {"accuracy": accuracy}
        self._write("validation", {"step": number, "loss": loss, **more})
        right = "" if accuracy is None else f", accuracy {accuracy:.3f}"
        say(f"validation after step {number}: {loss:.4f} {unit}{right}")

    def _write(self, name: str, record: dict[str, Any]) -> None:
        self._files[name].write(json.dumps(record) + "\n")
        self._files[name].flush()

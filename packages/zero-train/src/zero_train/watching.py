"""Measures the steps of a Trainer, shows and writes them, and stops it after a signal. Owns no assembly and no data."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_train import engine, progress, report
from zero_train.loop import History, Phases, Step, peak_rss_bytes
from zero_train.train import Run

__all__ = ["Watch"]


@dataclass
class Watch:
    """Measures steps, shows and writes them, and stops the trainer after a signal."""

    run: Run
    history: History
    folder: Path
    done: int  # steps before this process
    ready: engine.Assembled | None = None
    _open: ExitStack = field(default_factory=ExitStack)
    _step: ExitStack = field(default_factory=ExitStack)
    _phases: Phases = field(default_factory=lambda: Phases(0))
    _usage: engine.Usage = field(default_factory=engine.Usage)
    _tokens: float = 0.0
    _begun: float = 0.0
    _seconds: float = 0.0

    def __enter__(self) -> Watch:
        run = self.run.config.run
        leader = self.run.ranks.leader
        self._shown = self._open.enter_context(
            progress.reporter(leader, run.steps, self.done, run.report_every, run.bar)
        )
        self._metrics = self._open.enter_context(report.Metrics(self.folder, self.done + 1)) if leader else None
        return self

    def __exit__(self, *failed: Any) -> None:
        self._step.close()
        self._open.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of a step, for the timeline and for the history."""
        if self.ready is None or not self._begun:  # an evaluation
            yield
            return
        begun = time.perf_counter()
        with self.ready.timeline.span(name, ""):
            yield
        setattr(self._phases, name, getattr(self._phases, name) + time.perf_counter() - begun)

    def begin(self, number: int) -> None:
        assert self.ready is not None
        if number == self.done + 1:
            self._usage = self.ready.usage()
        self._phases = Phases(number)
        self._begun = time.perf_counter()
        self._step.enter_context(self.ready.timeline.span("step", str(number)))

    def end(self, last: bool) -> None:
        assert self.ready is not None
        if last:
            self.ready.wait()
        self._step.close()
        self._seconds, self._begun = time.perf_counter() - self._begun, 0.0
        self.history.phases.append(self._phases)
        if last:
            self.ready.timeline.enabled = False  # the timeline shows steps only

    def log(self, number: int, logs: dict[str, Any]) -> None:
        if "eval_loss" in logs:
            self.history.validation.append((number, logs["eval_loss"]))
            if self._metrics:
                self._metrics.validation(number, logs["eval_loss"])
            self._shown.say(f"validation after step {number}: {logs['eval_loss']:.4f} {self.run.unit}")
        if "loss" not in logs:
            return
        assert self.ready is not None
        before, usage = self._usage, self.ready.usage()
        self._usage = usage
        tokens, self._tokens = float(logs.get("num_tokens", 0)) - self._tokens, float(logs.get("num_tokens", 0))
        step = Step(
            step=number,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm", float("nan")),
            learning_rate=logs["learning_rate"],
            step_seconds=self._seconds,
            tokens_per_second=tokens / self._seconds,
            peak_rss_bytes=peak_rss_bytes(),
            **usage.since(before),
        )
        self.history.steps.append(step)
        if self._metrics:
            self._metrics.step(step)
        self._shown.step(step)

    def callback(self) -> Any:
        from transformers import TrainerCallback

        watch, run, asked, ranks = self, self.run.config.run, self.run.asked, self.run.ranks

        class Told(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                watch.begin(state.global_step + 1)

            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                self.updating = ExitStack()
                self.updating.enter_context(watch.phase("optimizer"))

            def on_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                self.updating.close()

            def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                signal = ranks.most(asked.signal)
                watch.end(bool(signal) or state.global_step == run.steps)
                if signal:
                    control.should_training_stop = True
                    control.should_evaluate = False
                    control.should_save = run.checkpoint_every > 0

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
                watch.log(state.global_step, logs)

        return Told()

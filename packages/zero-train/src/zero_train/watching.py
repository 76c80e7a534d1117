"""Measures the steps of a Trainer, shows and writes them, and stops it after a signal. Owns no assembly and no data."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from zero_train.engine import Assembled
from zero_train.loop import History, Meter
from zero_train.train import Run, Told

__all__ = ["Watch"]


@dataclass
class Watch:
    """Measures steps, shows and writes them, and stops the trainer after a signal."""

    run: Run
    history: History
    done: int  # steps before this process
    ready: Assembled | None = None
    _meter: Meter | None = None  # from the first step on
    _open: ExitStack = field(default_factory=ExitStack)
    _step: ExitStack = field(default_factory=ExitStack)
    _tokens: float = 0.0

    def __enter__(self) -> Watch:
        self._told = self._open.enter_context(Told(self.run, self.done))
        self._open.push(self._step)
        return self

    def __exit__(self, *failed: Any) -> None:
        self._open.__exit__(*failed)

    def assembled(self, ready: Assembled) -> None:
        """Takes the engine, which the trainer assembles when it makes its optimizer."""
        self.ready = ready

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a phase of a step, for the timeline and for the history."""
        return nullcontext() if self._meter is None else self._meter.phase(name)

    def begin(self, number: int) -> None:
        assert self.ready is not None
        self._meter = self._meter or Meter(self.ready, self.history)
        self._step.enter_context(self._meter.step(number))

    def end(self, last: bool) -> None:
        assert self.ready is not None
        if last:
            self.ready.wait()
        self._step.close()
        if last:
            self.ready.timeline.enabled = False  # the timeline shows steps only

    def log(self, number: int, logs: dict[str, Any]) -> None:
        if "eval_loss" in logs:
            self.history.validation.append((number, logs["eval_loss"]))
            self._told.validation(number, logs["eval_loss"], self.run.unit)
        if "loss" not in logs:
            return
        assert self._meter is not None
        before, self._tokens = self._tokens, float(logs.get("num_tokens", 0))
        norm, rate = logs.get("grad_norm", float("nan")), logs["learning_rate"]
        self._told.step(self._meter.line(self._tokens - before, loss=logs["loss"], grad_norm=norm, learning_rate=rate))

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

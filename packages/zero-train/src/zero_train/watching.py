"""Measures the steps of a Trainer, shows and writes them, and stops it after a signal. Owns no assembly and no data."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from zero_train import evaluating, passes
from zero_train.engine import Assembled
from zero_train.loop import History, Meter
from zero_train.progress import Told
from zero_train.train import Run

__all__ = ["Watch"]


@dataclass
class Watch:
    """Measures steps, shows and writes them, and stops the trainer after a signal."""

    run: Run
    history: History
    done: int  # steps before this process
    validates: bool = False  # whether there are rows to take a validation loss of
    ready: Assembled | None = None
    _meter: Meter | None = None  # from the first step on
    _open: ExitStack = field(default_factory=ExitStack)
    _step: ExitStack = field(default_factory=ExitStack)
    _tokens: float = 0.0

    def __enter__(self) -> Watch:
        run = self.run
        self._told = self._open.enter_context(Told(run.folder, run.config.run, self.done, run.ranks.leader))
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
            self._told.validation(number, logs["eval_loss"], self.run.unit, logs.get("eval_accuracy"))
        if "loss" not in logs:
            return
        assert self._meter is not None
        before, self._tokens = self._tokens, float(logs.get("num_tokens", 0))
        if "reward" in logs and (number % self.run.config.run.report_every == 0 or number == self.run.config.run.steps):
            self.say(f"step {number}: mean reward {logs['reward']:.4f}")
        norm, rate = logs.get("grad_norm", float("nan")), logs["learning_rate"]
        self._told.step(self._meter.line(self._tokens - before, loss=logs["loss"], grad_norm=norm, learning_rate=rate))

    def say(self, text: str) -> None:
        self.run._say(text)

    def evaluates(self, number: int) -> bool:
        """Whether a validation loss is due after step `number`."""
        return self.validates and passes.evaluates(self.run.config.run, number, self.run.items(None) or 1)

    def callback(self) -> Any:
        from transformers import TrainerCallback

        def told(found: evaluating.Verdict) -> str:
            least = f" by more than {run.min_improvement:g}" if run.min_improvement else ""
            return (
                f"the last {found.waited} validation losses did not fall{least} (run.patience={run.patience}); the "
                f"lowest was {found.loss:.4f} after step {found.step}"
            )

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
                signal, number = ranks.most(asked.signal), state.global_step
                watch.end(bool(signal) or number == run.steps)
                control.should_evaluate = not signal and watch.evaluates(number)
                if signal:
                    self.stop(control)

            def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **rest: Any) -> None:
                if ranks.most(asked.signal):
                    self.stop(control)
                    return
                found = evaluating.verdict(run, state.log_history)
                if run.keep_best and found.step and found.step == state.global_step:
                    state.best_metric, state.best_global_step = found.loss, found.step
                    control.should_save = True
                if found.stops and state.global_step < run.steps:
                    watch.say(f"stopping after step {state.global_step}: {told(found)}")
                    self.stop(control)

            def stop(self, control: Any) -> None:
                control.should_training_stop = True
                control.should_save = run.checkpoint_every > 0

            def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
                if watch.ready is not None:
                    watch.ready.timeline.enabled = False  # also where the run stopped early

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
                watch.log(state.global_step, logs)

        return Told()

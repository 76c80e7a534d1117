"""Measures the steps of a Trainer, shows and writes them, and stops it after a signal. Owns no assembly and no data."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from transformers import TrainerCallback

from zero_offload import Plan
from zero_train.report.metrics import History, Meter
from zero_train.report.progress import Told
from zero_train.run.assemble import Draft
from zero_train.run.loop import evaluates
from zero_train.tune import validation


class Watch(TrainerCallback):
    """A Trainer's callback that measures steps, shows and writes them, and stops the trainer after a signal."""

    ready: Any = None  # an Assembled, from the moment when the trainer makes its optimizer
    _told: Told  # from `begin` on
    _meter: Any = None  # a Meter, from the first step on
    _tokens = 0.0

    def __init__(self, run: Any, stack: ExitStack, draft: Draft, plan: Plan, done: int, validates: bool) -> None:
        """stack: closes store and files. done: steps before this process. validates: whether rows are held out."""
        self.run, self.stack, self.draft, self.plan = run, stack, draft, plan  # run: a finetune.FineTune
        self.history, self._done, self._validates = History(), done, validates
        self._step, self._update = ExitStack(), ExitStack()

    def begin(self) -> None:
        """Opens the files of figures, which `stack` closes."""
        run = self.run
        self._told = self.stack.enter_context(Told(run.folder, run.config.run, self._done, run.ranks.leader))
        self.stack.push(self._step)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a phase of a step, for the timeline and for the history."""
        return nullcontext() if self._meter is None else self._meter.phase(name)

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._meter = self._meter or Meter(self.ready, self.history)
        self._step.enter_context(self._meter.step(state.global_step + 1))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._update.enter_context(self.phase("optimizer"))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self._update.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        run, number, ready = self.run.config.run, state.global_step, self.ready
        signal = self.run.ranks.most(self.run.asked.signal)
        last = bool(signal) or number == run.steps
        if last:
            ready.wait()
        self._step.close()
        ready.timeline.enabled = not last  # it shows steps only
        due = evaluates(run, number, self.run.items(None) or 1)
        control.should_evaluate = self._validates and not signal and due
        if signal:
            self._stop(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        run = self.run.config.run
        if self.run.ranks.most(self.run.asked.signal):
            self._stop(control)
            return
        found = validation.verdict(run, state.log_history)
        if run.keep_best and found.step and found.step == state.global_step:
            state.best_metric, state.best_global_step = found.loss, found.step
            control.should_save = True
        if found.stops and state.global_step < run.steps:
            self.run.say(
                f"stopping after step {state.global_step}: the last {found.waited} validation losses did not fall "
                f"(run.patience={run.patience}); the lowest was {found.loss:.4f} after step {found.step}"
            )
            self._stop(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        if self.ready is not None:
            self.ready.timeline.enabled = False  # also where the run stopped early

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        run, number = self.run.config.run, state.global_step
        if "eval_loss" in logs:
            self.history.validation.append((number, logs["eval_loss"]))
            self._told.validation(number, logs["eval_loss"], self.run.unit, logs.get("eval_accuracy"))
        if "loss" not in logs:
            return
        before, self._tokens = self._tokens, float(logs.get("num_tokens", 0))
        if "reward" in logs and (number % run.report_every == 0 or number == run.steps):
            self.run.say(f"step {number}: mean reward {logs['reward']:.4f}")
        norm, rate = logs.get("grad_norm", float("nan")), logs["learning_rate"]
        self._told.step(self._meter.line(self._tokens - before, loss=logs["loss"], grad_norm=norm, learning_rate=rate))

    def _stop(self, control: Any) -> None:
        control.should_training_stop = True
        control.should_save = self.run.config.run.checkpoint_every > 0

"""The training loop: steps, validation losses, and what each of them cost. Owns no assembly and no files.

step    micro-batches: forward, backward ─> set the learning rate ─> optimizer.step ─> zero_grad
stop    asked by a signal on any rank, agreed on by all ranks after the step or validation batch under way
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import zero_core
from zero_train import models
from zero_train.data import Corpus
from zero_train.engine import Engine, Usage
from zero_train.interrupt import Interrupt
from zero_train.planning import holds_back
from zero_train.ranks import Ranks
from zero_train.schema import Config, OptimConfig


@dataclass(frozen=True)
class Step:
    """A line of metrics.jsonl. The last step's counters include the update that would have run behind the next."""

    step: int  # from 1
    loss: float  # nats a byte, mean over ranks and micro-batches
    grad_norm: float  # before clipping
    learning_rate: float
    step_seconds: float
    tokens_per_second: float  # of all ranks
    exposed_seconds: float  # what overlap did not hide
    nvme_read_bytes: int
    nvme_write_bytes: int
    host_bytes: int
    device_bytes: int
    peak_rss_bytes: int  # VmHWM since the process began


@dataclass(frozen=True)
class Phases:
    """Where a step's seconds went, on the thread that trains."""

    step: int
    data: float
    forward: float
    backward: float
    optimizer: float


@dataclass
class History:
    """What a run has measured so far."""

    steps: list[Step] = field(default_factory=list)
    phases: list[Phases] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)  # (after step, nats a byte)


class Loop:
    """Runs steps of one engine over one corpus."""

    def __init__(self, engine: Engine, corpus: Corpus, config: Config, ranks: Ranks, interrupt: Interrupt) -> None:
        self._engine, self._corpus, self._config, self._ranks = engine, corpus, config, ranks
        self._interrupt = interrupt
        self._before = engine.usage()
        self.history = History()

    def run(
        self,
        first: int,
        on_step: Callable[[Step], None],
        on_validation: Callable[[int, float], None],
        on_checkpoint: Callable[[int], None],
    ) -> int:
        """Steps `first` to run.steps. Returns the signal that ended it early, or 0.

        The callbacks are called after each step, after each validation loss, and where a checkpoint is due.
        """
        run = self._config.run
        signal = 0
        if run.evaluate_every and first == 1:
            signal = self._validate(0, on_validation)
        for number in range(first, run.steps + 1):
            if signal:
                return signal
            with self._span("step", str(number)):
                step = self._step(number)
            self.history.steps.append(step)
            on_step(step)
            signal = self._signal()
            if signal or number == run.steps:
                self._engine.settle()
                self._engine.timeline.enabled = False  # what comes after the last step is no part of one
            if not signal and _due(number, run.evaluate_every, run.steps):
                signal = self._validate(number, on_validation)
            if run.checkpoint_every and (signal or _due(number, run.checkpoint_every, run.steps)):
                on_checkpoint(number)
        return signal

    def _step(self, number: int) -> Step:
        """One optimizer step, measured."""
        run, engine = self._config.run, self._engine
        begun = time.perf_counter()
        losses, seconds = self._gradients(number)
        rate = learning_rate(self._config.optim, number, run.steps)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        updating = time.perf_counter()
        with self._span("optimizer", ""):
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if number == run.steps:
                engine.settle()
        ended = time.perf_counter()
        self.history.phases.append(Phases(number, *seconds, ended - updating))
        usage = engine.usage()
        spent = _difference(usage, self._before)
        self._before = usage
        rows = run.micro_batch * run.accumulate * self._ranks.world_size
        return Step(
            step=number,
            loss=self._ranks.mean(sum(loss.item() for loss in losses) / len(losses)),
            grad_norm=float(engine.optimizer.grad_norm),
            learning_rate=rate,
            step_seconds=ended - begun,
            tokens_per_second=rows * self._config.data.sequence_length / (ended - begun),
            exposed_seconds=spent.exposed_seconds,
            nvme_read_bytes=spent.nvme_read_bytes,
            nvme_write_bytes=spent.nvme_write_bytes,
            host_bytes=usage.host_bytes,
            device_bytes=usage.device_bytes,
            peak_rss_bytes=peak_rss_bytes(),
        )

    def _gradients(self, number: int) -> tuple[list[Tensor], tuple[float, float, float]]:
        """Forward and backward of every micro-batch of a step; their losses, and the seconds of each phase."""
        run, model = self._config.run, self._engine.model
        losses: list[Tensor] = []
        seconds = [0.0, 0.0, 0.0]
        for micro in range(run.accumulate):
            marks = [time.perf_counter()]
            with self._span("data", ""):
                tokens, targets = self._batch(number, micro)
            marks.append(time.perf_counter())
            waits = holds_back(self._config) and micro + 1 < run.accumulate
            with zero_core.no_sync(model) if waits else nullcontext():
                with self._span("forward", ""):
                    loss = _loss(model, tokens, targets)
                marks.append(time.perf_counter())
                with self._span("backward", ""):
                    (loss / run.accumulate).backward()
            losses.append(loss.detach())
            marks.append(time.perf_counter())
            seconds = [total + end - begin for total, begin, end in zip(seconds, marks, marks[1:], strict=False)]
        return losses, (seconds[0], seconds[1], seconds[2])

    def _batch(self, number: int, micro: int) -> tuple[Tensor, Tensor]:
        """Samples are numbered through all steps, micro-batches and ranks: the same global batch at any world size."""
        run, ranks = self._config.run, self._ranks
        turn = ((number - 1) * run.accumulate + micro) * ranks.world_size + ranks.rank
        tokens, targets = self._corpus.batch(
            turn * run.micro_batch, run.micro_batch, self._config.data.sequence_length, run.seed
        )
        return tokens.to(ranks.device), targets.to(ranks.device)

    def _validate(self, number: int, on_validation: Callable[[int, float], None]) -> int:
        """The validation loss after step `number`. Returns the signal that ended it early, or 0."""
        run, ranks, model = self._config.run, self._ranks, self._engine.model
        rounds = max(1, run.evaluate_batches // ranks.world_size)
        total = 0.0
        model.eval()
        for turn in range(rounds):
            tokens, targets = self._corpus.validation_batch(
                turn * ranks.world_size + ranks.rank,
                rounds * ranks.world_size,
                run.micro_batch,
                self._config.data.sequence_length,
            )
            with torch.no_grad():
                total += _loss(model, tokens.to(ranks.device), targets.to(ranks.device)).item()
            if signal := self._signal():
                model.train()
                return signal
        model.train()
        loss = ranks.mean(total / rounds)
        self.history.validation.append((number, loss))
        on_validation(number, loss)
        return 0

    def _span(self, kind: str, name: str) -> AbstractContextManager[None]:
        """A part of a step in the timeline: step, data, forward, backward, optimizer."""
        span: AbstractContextManager[None] = self._engine.timeline.span(kind, name)
        return span

    def _signal(self) -> int:
        return self._ranks.most(self._interrupt.signal)


def _due(number: int, every: int, steps: int) -> bool:
    return every > 0 and (number % every == 0 or number == steps)


def learning_rate(optim: OptimConfig, number: int, steps: int) -> float:
    """Of step `number` (from 1) of `steps`: linear warm-up, then a cosine to final_fraction of optim.lr."""
    if number <= optim.warmup_steps:
        return optim.lr * number / optim.warmup_steps
    done = (number - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return optim.lr * (optim.final_fraction + (1 - optim.final_fraction) * cosine)


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far: VmHWM of /proc/self/status."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def _loss(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(models.logits(model, tokens).flatten(0, 1), targets.flatten())


def _difference(now: Usage, before: Usage) -> Usage:
    return Usage(
        exposed_seconds=now.exposed_seconds - before.exposed_seconds,
        nvme_read_bytes=now.nvme_read_bytes - before.nvme_read_bytes,
        nvme_write_bytes=now.nvme_write_bytes - before.nvme_write_bytes,
    )

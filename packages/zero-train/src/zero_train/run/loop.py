"""Runs the training loop: counts passes over the data, takes steps and validation losses, and measures them.

Owns no assembly and no files.

step    micro-batches: forward, backward ─> set the learning rate ─> optimizer.step ─> zero_grad
stop    a signal on any rank is agreed on by all ranks after the current step or validation batch
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import zero_core
from zero_core.device import later, sent
from zero_train.data.text import Corpus
from zero_train.declare import tenth
from zero_train.model import causal_lm
from zero_train.report.metrics import History, Meter
from zero_train.run.assemble import Assembled
from zero_train.run.interrupt import Interrupt
from zero_train.run.planning import holds_back
from zero_train.run.ranks import Ranks
from zero_train.schema import Config, OptimConfig, RunConfig
from zero_train.settings import checks

EPOCH = "epoch"  # of run.evaluate_every


def settle_steps(config: Config, items: float) -> None:
    """Sets run.steps and optim.warmup_steps from run.epochs, if that is given. The last step may begin one more pass.

    Args:
        config: its run.global_batch is known.
        items: rows to train on; of a text, its length in sequences.

    Raises:
        ConfigError: the warm-up is longer than the run.
    """
    run = config.run
    if run.epochs is not None:
        assert run.global_batch is not None
        run.steps = max(1, math.ceil(run.epochs * items / run.global_batch - 1e-9))
        checks.warmup(config)


def evaluates(run: RunConfig, number: int, items: float) -> bool:
    """Returns whether a validation loss is due after step `number`. items: as of `settle_steps`."""
    every = run.evaluate_every
    if every == EPOCH:
        assert run.global_batch is not None
        begun, done = ((step * run.global_batch + 1e-9) // items for step in (number - 1, number))
        return number == run.steps or done > begun
    return every > 0 and (number % every == 0 or number == run.steps)


def passes_over(samples: float, items: float, what: str) -> str:
    """Returns "1.7 passes over 1,234 rows" for the `samples` that were, or will be, drawn, to within one row."""
    if samples < 1:  # of a set with a small weight
        return f"at most 1 of {what}"
    passes = f"{samples / items:.2g}" if samples < 100 * items else f"{samples / items:,.0f}"
    return f"{passes} pass{'' if passes == '1' else 'es'} over {what}"


class Loop:
    """Trains one engine on one corpus. step: the one that is being taken, from 1."""

    step = 0
    _meter: Meter  # from `run` on: it counts from there

    def __init__(self, engine: Assembled, corpus: Corpus, config: Config, ranks: Ranks, interrupt: Interrupt) -> None:
        self._engine, self._corpus, self._config, self._ranks = engine, corpus, config, ranks
        self._interrupt = interrupt
        self.history = History()

    def run(self, first: int, told: Any, save: Callable[[int], None]) -> int:
        """Runs steps `first` to run.steps. Returns the signal that ended the loop early, or 0.

        told: a progress.Told. save: called whenever a checkpoint is due.
        """
        run, timeline, ranks = self._config.run, self._engine.timeline, self._ranks
        self._meter = Meter(self._engine, self.history)
        tokens = run.micro_batch * run.accumulate * ranks.world_size * self._config.data.sequence_length
        signal, items = 0, self._corpus.training.numel() / self._config.data.sequence_length
        if run.evaluate_every and first == 1:
            signal = self._validate(0, told)
        for number in range(first, run.steps + 1):
            if signal:
                return signal
            self.step = number
            with self._meter.step(number):
                losses, rate = self._step(number)
            self.step = number + 1
            loss, norm = ranks.mean(sum(losses()) / run.accumulate), float(self._engine.optimizer.grad_norm)
            told.step(self._meter.line(tokens, loss=loss, grad_norm=norm, learning_rate=rate))
            signal = ranks.most(self._interrupt.signal)
            if signal or number == run.steps:
                self._engine.wait()
                timeline.enabled = False  # the timeline shows steps only, not what follows the last one
            if not signal and evaluates(run, number, items):
                signal = self._validate(number, told)
            if run.checkpoint_every and (signal or number % run.checkpoint_every == 0 or number == run.steps):
                save(number)
        return signal

    def _step(self, number: int) -> tuple[Callable[[], list[float]], float]:
        """Runs one optimizer step. Returns a function for the losses of its micro-batches, and the learning rate."""
        run, engine = self._config.run, self._engine
        losses = later(torch.stack([self._gradient(number, micro) for micro in range(run.accumulate)]))
        optim, steps = self._config.optim, run.steps
        for group in engine.optimizer.param_groups:
            group["lr"] = learning_rate(optim, number, steps, matrices="ns_steps" in group)
        with self._meter.phase("optimizer"):
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            if number == run.steps:
                engine.wait()
        return losses, learning_rate(optim, number, steps)

    def _gradient(self, number: int, micro: int) -> Tensor:
        """Runs forward and backward of one micro-batch and returns its loss.

        Samples are numbered across steps, micro-batches and ranks, so that the global batch is the same at every world
        size.
        """
        run, ranks, model = self._config.run, self._ranks, self._engine.model
        with self._meter.phase("data"):
            turn = ((number - 1) * run.accumulate + micro) * ranks.world_size + ranks.rank
            tokens, targets = self._corpus.batch(
                turn * run.micro_batch, run.micro_batch, self._config.data.sequence_length, run.seed
            )
            tokens, targets = sent(tokens, ranks.device), sent(targets, ranks.device)
        waits = holds_back(self._config) and micro + 1 < run.accumulate
        with zero_core.no_sync(model) if waits else nullcontext():
            with self._meter.phase("forward"):
                loss = loss_of(model, tokens, targets)
            with self._meter.phase("backward"):
                self._engine.optimizer.scale_loss(loss / run.accumulate).backward()
        return loss.detach()

    def _validate(self, number: int, told: Any) -> int:
        """Takes the validation loss after step `number`. Returns the signal that ended it early, or 0."""
        run, ranks, model = self._config.run, self._ranks, self._engine.model
        batches, total, signal = run.evaluate_batches or 1, 0.0, 0
        model.eval()
        for first in range(0, batches, ranks.world_size):
            index = first + ranks.rank
            tokens, targets = self._corpus.validation_batch(
                min(index, batches - 1), batches, run.micro_batch, self._config.data.sequence_length
            )
            rows = self._engine.rows or len(tokens)  # units do not cut a batch where nothing is kept for backward
            with torch.no_grad():
                for part, wanted in zip(tokens.split(rows), targets.split(rows), strict=True):
                    loss = loss_of(model, sent(part, ranks.device), sent(wanted, ranks.device)).item()
                    total += loss * (len(part) / len(tokens)) * (index < batches)
            if signal := ranks.most(self._interrupt.signal):
                break
        model.train()
        if not signal:
            mean = ranks.sum(total) / batches
            self.history.validation.append((number, mean))
            told.validation(number, mean, f"nats/{self._corpus.unit}")
        return signal


def learning_rate(optim: OptimConfig, number: int, steps: int, *, matrices: bool = False) -> float:
    """Returns the rate of step `number` (from 1), see `share`. matrices: the rate of Muon's group."""
    return (optim.matrix_lr if matrices else optim.lr) * share(optim, number, steps)


def share(optim: OptimConfig, number: int, steps: int) -> float:
    """Returns the part of optim.lr at step `number`: a linear warm-up, then a cosine to optim.final_fraction."""
    warmup = tenth(steps) if optim.warmup_steps is None else optim.warmup_steps
    if number <= warmup:
        return number / warmup
    done = (number - warmup) / max(1, steps - warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return optim.final_fraction + (1 - optim.final_fraction) * cosine


def loss_of(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(causal_lm.logits(model, tokens).flatten(0, 1), targets.flatten())

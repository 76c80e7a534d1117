"""Counts passes over the data: the steps that run.epochs takes, and the passes that a number of steps makes."""

from __future__ import annotations

import math

from zero_train.schema import Config, RunConfig
from zero_train.settings import checks

EPOCH = "epoch"  # of run.evaluate_every


def settle(config: Config, items: float) -> None:
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
    """Returns whether a validation loss is due after step `number`. items: as of `settle`."""
    every = run.evaluate_every
    if every == EPOCH:
        assert run.global_batch is not None
        begun, done = ((step * run.global_batch + 1e-9) // items for step in (number - 1, number))
        return number == run.steps or done > begun
    return every > 0 and (number % every == 0 or number == run.steps)


def over(samples: float, items: float, what: str) -> str:
    """Returns "1.7 passes over 1,234 rows" for the `samples` that were, or will be, drawn, to within one row."""
    if samples < 1:  # of a set with a small weight
        return f"at most 1 of {what}"
    passes = f"{samples / items:.2g}" if samples < 100 * items else f"{samples / items:,.0f}"
    return f"{passes} pass{'' if passes == '1' else 'es'} over {what}"

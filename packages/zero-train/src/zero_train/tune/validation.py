"""Computes the loss on held-out rows in fine-tuning, and decides which evaluation was the best and when to stop.

Both follow from the losses so far, which a Trainer keeps in its checkpoints, so there is no other state to restore.
Owns no model and no trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zero_train.errors import ConfigError
from zero_train.schema import RunConfig

_NOT_LEARNED = -100


@dataclass(frozen=True)
class Verdict:
    """The best evaluation of a run so far, and whether the run stops."""

    step: int = 0  # of the lowest loss; 0: there is none
    loss: float = math.inf
    waited: int = 0  # evaluations since the loss was the lowest
    stops: bool = False  # `waited` has reached run.patience


def verdict(run: RunConfig, history: Iterable[Mapping[str, Any]]) -> Verdict:
    """Returns the verdict on a Trainer's log_history. The evaluation before the first step does not count."""
    step, lowest, waited = 0, math.inf, 0
    for line in history:
        loss = line.get("eval_loss")
        if loss is None or not line["step"]:
            continue
        waited += 1
        if loss < lowest:
            step, lowest, waited = line["step"], loss, 0
    return Verdict(step, lowest, waited, run.patience is not None and waited >= run.patience)


def batches_of(rows: int, at_once: int, rank: int, ranks: int) -> list[list[int]]:
    """Returns the numbers of the rows in each batch of this rank.

    All ranks have equally many batches, with equally many rows in each, because trainers exchange tensors of one shape.
    The last batch is the exception: there some ranks may have one row and others none.
    """
    batches, first = [], 0
    while first < rows:
        size = min(at_once, max(1, (rows - first) // ranks))
        begin = first + rank * size
        batches.append(list(range(begin, min(begin + size, rows))))
        first += size * ranks
    return batches


def mean_loss(
    trainer: Any, rows: Any, collate: Any, batches: Sequence[list[int]], ranks: Any, stop: Any, scores: bool = False
) -> float | None:
    """Returns the loss of `rows`, averaged over tokens that count, or over pairs. None: `stop` ended it. Collective.

    The same rows give the same mean at any number of ranks and with batches of any size, to within rounding.

    Args:
        trainer: its compute_loss returns the mean over a batch.
        batches: the numbers of this rank's `rows`. For an empty batch it computes row 0, to stay in step with the other
            ranks, and ignores the loss.
        ranks: zero_train's Ranks.
        stop: says whether to end early.
        scores: the trainer is TRL's RewardTrainer. Its accuracy is then a mean over pairs, too, and not over batches.

    Raises:
        ConfigError: no token of `rows` counts. Raised on every rank.
    """
    total = count = right = 0.0
    trainer.model.eval()
    for numbers in batches:
        inputs = trainer._prepare_inputs(collate([rows[at] for at in numbers or [0]]))
        labels = inputs.get("labels")
        weight = len(numbers) if labels is None else int((labels[..., 1:] != _NOT_LEARNED).sum()) * bool(numbers)
        with torch.no_grad():
            found = trainer.compute_loss(trainer.model, inputs, return_outputs=scores)
        loss = float(found[0] if scores else found)
        if weight:
            total, count = total + loss * weight, count + weight
            if scores:
                chosen, rejected = found[1].logits.flatten().chunk(2)  # of chosen texts, then of the others
                right += int((chosen > rejected).sum())
        if ranks.most(stop()):
            return None
    total, count, right = (ranks.sum(value) for value in (total, count, right))
    if not count:
        raise ConfigError(
            f"there is no validation loss: none of the {len(rows):,} validation rows has a token to learn in its "
            "first data.sequence_length tokens; raise that length. Or take more rows with run.evaluate_batches=null"
        )
    if scores:
        trainer._metrics["eval"]["accuracy"] = [right / count]  # TRL logs the mean of this list
    return float(total / count)

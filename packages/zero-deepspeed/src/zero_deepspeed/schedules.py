"""Implements DeepSpeed's learning rate schedules as torch schedulers: the same numbers, step for step.

Each is a function of the step. DeepSpeed counts its scheduler's calls from -1, when it is built, so `at` is torch's
`last_epoch` - 1. Its warm-ups are one call behind transformers', and rise by the logarithm, so that neither torch nor
transformers has its numbers. torch's own schedules may be named, too.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

__all__ = [*("WarmupCosineLR", "WarmupDecayLR", "WarmupLR"), *("SCHEDULES", "TYPES", "Schedule", "defaults_of", "make")]


class Schedule(LRScheduler):
    """A schedule with DeepSpeed's parameters and its state, {"last_batch_iteration": calls of step() - 1}.

    rate: returns a group's learning rate after call `at`, from the group's own `lr`.
    """

    def __init__(self, rate: Callable[..., Any], optimizer: torch.optim.Optimizer, *values: Any, **given: Any) -> None:
        given = inspect.signature(functools.partial(rate, 0, 0.0)).bind(*values, **given).arguments
        self._rates = [functools.partial(rate, lr=float(group["lr"]), **given) for group in optimizer.param_groups]
        super().__init__(optimizer)

    @property
    def last_batch_iteration(self) -> int:
        return self.last_epoch - 1

    def get_lr(self) -> list[Any]:
        return [rate(self.last_batch_iteration) for rate in self._rates]

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues after the saved step. The optimizer gets the learning rates of that step."""
        self.last_epoch = int(state_dict["last_batch_iteration"])
        self._step_count = 2  # past the call at which torch warns of an optimizer that has not stepped
        self.step()


def _warm(at: int, steps: int, kind: str) -> float:
    """Returns the fraction of the warm-up that is done after call `at`, 0 before the first."""
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type={kind!r}: write log or linear")
    if at >= steps:
        return 1.0
    if at < 0 or kind == "linear":
        return max(0, at) / float(steps)
    return math.log(at + 1) * (1.0 / math.log(steps))  # not a division: DeepSpeed's bits


def _warmup(at, lr, warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type="log"):
    """Up to warmup_max_lr, by the logarithm or linearly, then constant. None: to each group's own lr."""
    high = lr if warmup_max_lr is None else warmup_max_lr
    return warmup_min_lr + (high - warmup_min_lr) * _warm(at, max(2, warmup_num_steps), warmup_type)


def _warmup_decay(
    at, lr, total_num_steps, warmup_min_lr=0.0, warmup_max_lr=1e-3, warmup_num_steps=1000, warmup_type="log"
):
    """As _warmup, then linearly down to warmup_min_lr at call total_num_steps."""
    steps = max(2, warmup_num_steps)
    left = max(0.0, (total_num_steps - at) / max(1.0, total_num_steps - steps))
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * (left if at >= steps else _warm(at, steps, warmup_type))


def _warmup_cosine(
    at, lr, total_num_steps, warmup_min_ratio=0.0, warmup_num_steps=1000, cos_min_ratio=1e-4, warmup_type="log"
):
    """The group's own lr times a ratio: up from warmup_min_ratio to 1, then down a cosine to cos_min_ratio."""
    steps = max(2, warmup_num_steps)
    if at < 0:
        return 0.0  # not warmup_min_ratio: so the first step of a run changes nothing
    if at < steps:
        return lr * (warmup_min_ratio + _warm(at, steps, warmup_type) * (1.0 - warmup_min_ratio))
    done = min(1.0, (at - steps + 1) / max(1.0, total_num_steps - steps))
    return lr * max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * ((1 + math.cos(math.pi * done)) / 2))


_RATES: dict[str, Callable[..., Any]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
}
SCHEDULES = {name: functools.partial(Schedule, rate) for name, rate in _RATES.items()}
WarmupLR, WarmupDecayLR, WarmupCosineLR = SCHEDULES.values()
TYPES = (*SCHEDULES, "or a class of torch")

# torch's schedulers, except those that take a metric, functions or other schedulers
_TORCHS = {*torch.optim.lr_scheduler.__all__} - {
    *("LRScheduler", "ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")
}


def defaults_of(name: str) -> dict[str, Any] | None:
    """Returns the parameters of a schedule of DeepSpeed's or of torch's, with their defaults; None: not known.

    The default of a parameter that has to be given is None.
    """
    if name not in _RATES and name not in _TORCHS:
        return None
    taken = inspect.signature(_RATES.get(name) or getattr(torch.optim.lr_scheduler, name)).parameters.values()
    found = {each.name: None if each.default is each.empty else each.default for each in taken}
    return {key: default for key, default in found.items() if key not in ("at", "lr", "optimizer")}


def make(name: str, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> LRScheduler:
    made: Any = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name)
    return made(optimizer, **given)

"""DeepSpeed's schedules of the learning rate as torch's schedulers: the same numbers, step for step.

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

__all__ = [
    *("LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"),
    *("SCHEDULES", "TYPES", "Schedule", "defaults_of", "make"),
]


class Schedule(LRScheduler):
    """A schedule with DeepSpeed's parameters and its state, {"last_batch_iteration": calls of step() - 1}.

    rate: returns a group's learning rate, or with it its first beta, after call `at`, from the group's own `lr`. A
    value may be a list, one for each group.
    """

    def __init__(self, rate: Callable[..., Any], optimizer: torch.optim.Optimizer, *values: Any, **given: Any) -> None:
        given = inspect.signature(functools.partial(rate, 0, 0.0)).bind(*values, **given).arguments
        lists = {name: value for name, value in given.items() if isinstance(value, (list, tuple))}
        groups = optimizer.param_groups
        for name, value in lists.items():
            if len(value) != len(groups):
                raise ValueError(f"{name} has {len(value)} values for {len(groups)} groups: give one for each")
        self._rates = [
            functools.partial(rate, lr=float(group["lr"]), **given | {name: value[i] for name, value in lists.items()})
            for i, group in enumerate(groups)
        ]
        super().__init__(optimizer)

    @property
    def last_batch_iteration(self) -> int:
        return self.last_epoch - 1

    def get_lr(self) -> list[Any]:
        """Also sets the first betas of a schedule that has them, as torch's OneCycleLR does."""
        found = [rate(self.last_batch_iteration) for rate in self._rates]
        for group, each in zip(self.optimizer.param_groups, found, strict=True):
            if isinstance(each, tuple) and "betas" in self.optimizer.defaults:
                group["betas"] = (each[1], 0.99)
        return [each[0] if isinstance(each, tuple) else each for each in found]

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after the step that was saved. The optimizer gets the learning rates of that step."""
        self.last_epoch = int(state_dict["last_batch_iteration"])
        self._step_count = 2  # past the call at which torch warns of an optimizer that has not stepped
        self.step()


def _warm(at: int, steps: int, kind: str) -> float:
    """The part of the way up that is done after call `at`, 0 before the first."""
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


def _range_test(
    at, lr, lr_range_test_min_lr=1e-3, lr_range_test_step_size=2000, lr_range_test_step_rate=1.0,
    lr_range_test_staircase=False,
):  # fmt: skip
    """Grows by lr_range_test_step_rate times the first learning rate in each lr_range_test_step_size calls."""
    done = (at + 1) / lr_range_test_step_size
    return lr_range_test_min_lr * (
        1 + lr_range_test_step_rate * (math.floor(done) if lr_range_test_staircase else done)
    )


def _one_cycle(
    at, lr, cycle_min_lr, cycle_max_lr, decay_lr_rate=0.0, cycle_first_step_size=2000, cycle_second_step_size=None,
    cycle_first_stair_count=0, cycle_second_stair_count=None, decay_step_size=0, cycle_momentum=True,
    cycle_min_mom=0.8, cycle_max_mom=0.9, decay_mom_rate=0.0,
):  # fmt: skip
    """Up from cycle_min_lr to cycle_max_lr and down again, then decaying; betas[0] moves the other way round.

    With cycle_momentum, betas[1] is 0.99 from the first call. Optimizers without betas keep their momentum. A rate of 0
    stops that decay, and no decay_step_size both. DeepSpeed then stays at the least rate.
    """
    first = float(cycle_first_step_size)
    second = first if cycle_second_step_size is None else float(cycle_second_step_size)
    if at < 0:
        rate, momentum = cycle_min_lr, cycle_min_mom
    elif at < first + second:
        down = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        part = _up(at + 1, first, second, cycle_first_stair_count, down)
        rate = cycle_min_lr + (cycle_max_lr - cycle_min_lr) * part
        momentum = cycle_max_mom - (cycle_max_mom - cycle_min_mom) * part
    else:
        intervals = (at - (first + second) + 1) / decay_step_size if decay_step_size else 0.0
        rate = cycle_min_lr / (1 + decay_lr_rate * intervals)
        momentum = cycle_max_mom * (1 + decay_mom_rate * intervals)
    return (rate, momentum) if cycle_momentum else rate


def _up(at: int, first: float, second: float, up: int, down: int) -> float:
    """How far up the rate of a cycle is, of 1. up, down: the stairs, 0 for none."""
    total = first + second
    turn = first / total
    x = 1.0 + at / total - math.floor(1 + at / total)
    part, stairs = (x / turn, up) if x <= turn else ((x - 1) / (turn - 1), down)
    if stairs:  # counted in whole calls: at a turn, `part` may be just below 1
        inside = at % total
        part = math.floor((inside / first if inside <= first else (total - inside) / second) * stairs) / stairs
    return part


_RATES: dict[str, Callable[..., Any]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
SCHEDULES = {name: functools.partial(Schedule, rate) for name, rate in _RATES.items()}
WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest = SCHEDULES.values()
TYPES = (*SCHEDULES, "or a class of torch")

# torch's, but for those that take a metric, functions or other schedulers
_TORCHS = {*torch.optim.lr_scheduler.__all__} - {
    *("LRScheduler", "ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler"),
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

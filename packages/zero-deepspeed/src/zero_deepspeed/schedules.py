"""DeepSpeed's schedules of the learning rate as torch's schedulers: the same numbers, step for step.

DeepSpeed counts its scheduler's calls from -1, when it is built: `last_batch_iteration` is torch's `last_epoch` - 1.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from .keys import Key, mapped
from .values import anything, flag, number, numbers, one_of, whole

__all__ = [
    "SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "make",
    "needed_by",
    "params_of",
]


class Schedule(LRScheduler):
    """A schedule whose state is DeepSpeed's: {"last_batch_iteration": calls of step() - 1}."""

    PARAMS: dict[str, Key] = {}

    @property
    def last_batch_iteration(self) -> int:
        return self.last_epoch - 1

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on after the step that was saved. The optimizer gets the learning rates of that step."""
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        self._step_count = self.last_epoch + 1
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _each(self, name: str, value: Any) -> list[Any]:
        """One value for each of the optimizer's groups."""
        count = len(self.optimizer.param_groups)
        if not isinstance(value, (list, tuple)):
            return [value] * count
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} values and the optimizer {count} groups: give one for each")
        return list(value)


_TYPES = ("log", "linear")


class WarmupLR(Schedule):
    """From warmup_min_lr to warmup_max_lr in warmup_num_steps calls, by the logarithm or linearly, then constant.

    warmup_max_lr: None is each group's own lr.
    """

    PARAMS = {
        "warmup_min_lr": mapped(numbers(), 0.0),
        "warmup_max_lr": mapped(numbers()),
        "warmup_num_steps": mapped(whole(1, exponent=False), 1000),
        "warmup_type": mapped(one_of(*_TYPES), "log"),
    }

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.optimizer = optimizer
        own = [float(group["lr"]) for group in optimizer.param_groups]
        self.lowest = self._each("warmup_min_lr", warmup_min_lr)
        self.highest = self._each("warmup_max_lr", own if warmup_max_lr is None else warmup_max_lr)
        self.warmup, self.kind = max(2, warmup_num_steps), warmup_type
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        part = self._part(self.last_batch_iteration)
        return [low + (high - low) * part for low, high in zip(self.lowest, self.highest, strict=True)]

    def _part(self, at: int) -> float:
        return _warm(self, at) if at < self.warmup else self._after(at)

    def _after(self, at: int) -> float:
        return 1.0


def _warm(schedule: Any, at: int) -> float:
    """The part of the way up that is done after call `at`, 0 before the first."""
    if at < 0:
        return 0.0
    if schedule.kind == "linear":
        return at / float(schedule.warmup)
    return math.log(at + 1) * (1.0 / math.log(schedule.warmup))  # not a division: DeepSpeed's bits


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, then linearly down to warmup_min_lr at call total_num_steps."""

    PARAMS = {
        "total_num_steps": mapped(whole(1)),
        **WarmupLR.PARAMS,
        "warmup_max_lr": mapped(numbers(), 1e-3),
    }

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Any = 0.0,
        warmup_max_lr: Any = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _after(self, at: int) -> float:
        return max(0.0, (self.total - at) / max(1.0, self.total - self.warmup))


class WarmupCosineLR(Schedule):
    """Each group's own lr times a ratio: up from warmup_min_ratio to 1, then down a cosine to cos_min_ratio."""

    PARAMS = {
        "total_num_steps": mapped(whole(1)),
        "warmup_min_ratio": mapped(number(), 0.0),
        "warmup_num_steps": mapped(whole(1, exponent=False), 1000),
        "cos_min_ratio": mapped(number(), 1e-4),
        "warmup_type": mapped(one_of(*_TYPES), "log"),
    }

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: str = "log",
    ) -> None:
        self.total, self.start, self.end = total_num_steps, warmup_min_ratio, cos_min_ratio
        self.warmup, self.kind = max(2, warmup_num_steps), warmup_type
        self.own = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        ratio = self._ratio(self.last_batch_iteration)
        return [rate * ratio for rate in self.own]

    def _ratio(self, at: int) -> float:
        if at < 0:
            return 0.0  # not warmup_min_ratio: so the first step of a run changes nothing
        if at < self.warmup:
            return self.start + _warm(self, at) * (1.0 - self.start)
        done = min(1.0, (at - self.warmup + 1) / max(1, self.total - self.warmup))
        return max(0.0, self.end + (1.0 - self.end) * ((1 + math.cos(math.pi * done)) / 2))


class LRRangeTest(Schedule):
    """Grows by lr_range_test_step_rate times the first learning rate in each lr_range_test_step_size calls."""

    PARAMS = {
        "lr_range_test_min_lr": mapped(numbers(), 1e-3),
        "lr_range_test_step_size": mapped(whole(1, exponent=False), 2000),
        "lr_range_test_step_rate": mapped(number(-math.inf), 1.0),
        "lr_range_test_staircase": mapped(flag, False),
    }

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Any = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.lowest = self._each("lr_range_test_min_lr", lr_range_test_min_lr)
        self.size, self.rate, self.stairs = lr_range_test_step_size, lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        done = (self.last_batch_iteration + 1) / self.size
        return [low * (1 + self.rate * (math.floor(done) if self.stairs else done)) for low in self.lowest]


class OneCycle(Schedule):
    """Up from cycle_min_lr to cycle_max_lr and down again, then decaying; betas[0] moves the other way round.

    With cycle_momentum, betas are set at each call, and betas[1] is 0.99 from the first. Optimizers without betas keep
    their momentum.
    """

    PARAMS = {
        "cycle_min_lr": mapped(numbers()),
        "cycle_max_lr": mapped(numbers()),
        "decay_lr_rate": mapped(number(-math.inf), 0.0),
        "cycle_first_step_size": mapped(whole(1), 2000),
        "cycle_second_step_size": mapped(whole()),
        "cycle_first_stair_count": mapped(whole(), 0),
        "cycle_second_stair_count": mapped(whole()),
        "decay_step_size": mapped(whole(), 0),
        "cycle_momentum": mapped(flag, True),
        "cycle_min_mom": mapped(numbers(), 0.8),
        "cycle_max_mom": mapped(numbers(), 0.9),
        "decay_mom_rate": mapped(number(-math.inf), 0.0),
    }

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Any,
        cycle_max_lr: Any,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Any = 0.8,
        cycle_max_mom: Any = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        self.optimizer = optimizer
        self.lowest = self._each("cycle_min_lr", cycle_min_lr)
        self.highest = self._each("cycle_max_lr", cycle_max_lr)
        self.first = float(cycle_first_step_size)
        self.second = self.first if cycle_second_step_size is None else float(cycle_second_step_size)
        self.stairs = (
            cycle_first_stair_count,
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
        )
        self.decay_size, self.decay_lr, self.decay_momentum = decay_step_size, decay_lr_rate, decay_mom_rate
        self.momenta = None
        if cycle_momentum and "betas" in optimizer.defaults:
            self.momenta = list(
                zip(self._each("cycle_min_mom", cycle_min_mom), self._each("cycle_max_mom", cycle_max_mom), strict=True)
            )
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Also sets the momenta, as torch's OneCycleLR does."""
        at = self.last_batch_iteration
        if at < 0:
            self._set_momenta([low for low, _ in self.momenta or ()])
            return self.lowest
        # A rate of 0 stops that decay, and no decay_step_size both. DeepSpeed then stays at the least rate.
        if at < self.first + self.second:
            part = self._part(at + 1)
            self._set_momenta([high - (high - low) * part for low, high in self.momenta or ()])
            return [low + (high - low) * part for low, high in zip(self.lowest, self.highest, strict=True)]
        past = at - (self.first + self.second) + 1
        intervals = past / self.decay_size if self.decay_size else 0.0
        self._set_momenta([high * (1 + self.decay_momentum * intervals) for _, high in self.momenta or ()])
        return [low / (1 + self.decay_lr * intervals) for low in self.lowest]

    def _part(self, at: int) -> float:
        """How far up the rate is, of 1."""
        total = self.first + self.second
        turn = self.first / total
        x = 1.0 + at / total - math.floor(1 + at / total)
        part, stairs = (x / turn, self.stairs[0]) if x <= turn else ((x - 1) / (turn - 1), self.stairs[1])
        if stairs:  # counted in whole calls: at a turn, `part` may be just below 1
            inside = at % total
            up = inside / self.first if inside <= self.first else (total - inside) / self.second
            part = math.floor(up * stairs) / stairs
        return part

    def _set_momenta(self, momenta: list[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta):  # noqa: B905  # none: they stay
            group["betas"] = (momentum, 0.99)


SCHEDULES: dict[str, type[Schedule]] = {
    made.__name__: made for made in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


# They take a metric, functions or other schedulers.
_NOT_FROM_JSON = ("ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")


def _torch_scheduler(name: str) -> type[LRScheduler] | None:
    made = getattr(torch.optim.lr_scheduler, name, None)
    taken = isinstance(made, type) and issubclass(made, LRScheduler) and made is not LRScheduler
    return made if taken and name not in _NOT_FROM_JSON else None


def params_of(name: str) -> dict[str, Key] | None:
    """Returns the parameters of a type of DeepSpeed's, or of a class of torch.optim.lr_scheduler; None: not known."""
    if name in SCHEDULES:
        return SCHEDULES[name].PARAMS
    made = _torch_scheduler(name)
    if made is None:
        return None
    return {key: mapped(anything) for key in list(inspect.signature(made).parameters)[1:]}


def needed_by(name: str) -> list[str]:
    """Returns the parameters without a default of a type that params_of knows."""
    made: Any = SCHEDULES.get(name) or _torch_scheduler(name)
    parameters = list(inspect.signature(made).parameters.values())[1:]
    return [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]


def make(name: str, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> LRScheduler:
    made: Any = SCHEDULES.get(name) or _torch_scheduler(name)
    return made(optimizer, **given)

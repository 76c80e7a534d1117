"""DeepSpeed's schedules of the learning rate as torch's schedulers: the same numbers, step for step.

DeepSpeed counts its scheduler's calls from -1, when it is built: `last_batch_iteration` is torch's `last_epoch` - 1.
Its warm-ups are one call behind transformers', and rise by the logarithm, so that no other library has its numbers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, cast

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
    """A schedule with DeepSpeed's parameters and its state, {"last_batch_iteration": calls of step() - 1}.

    PARAMS: its parameters, in order, of which the first `needs` have no default. A value may be a list, one a group.
    """

    PARAMS: dict[str, Key] = {}
    needs = 0

    def __init__(self, optimizer: torch.optim.Optimizer, *values: Any, **given: Any) -> None:
        given = dict(zip(self.PARAMS, values, strict=False)) | given
        wrong = [name for name in given if name not in self.PARAMS]
        wrong += [name for name in list(self.PARAMS)[: self.needs] if name not in given]
        if wrong or len(values) > len(self.PARAMS):
            raise TypeError(f"{', '.join(wrong)}: {type(self).__name__} takes {', '.join(self.PARAMS)}")
        count = len(optimizer.param_groups)
        for name, value in given.items():
            if isinstance(value, (list, tuple)) and len(value) != count:
                raise ValueError(f"{name} has {len(value)} values and the optimizer {count} groups: give one for each")
        self.given = {name: given.get(name, key.default) for name, key in self.PARAMS.items()}
        self.own = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer)

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

    def _each(self, name: str) -> list[Any]:
        """One value for each of the optimizer's groups. None is each group's own rate."""
        value = self.own if self.given[name] is None else self.given[name]
        return list(value) if isinstance(value, (list, tuple)) else [value] * len(self.own)

    def _warm(self, at: int) -> float | None:
        """The part of the way up that is done after call `at`, 0 before the first; None: it is over."""
        steps = max(2, self.given["warmup_num_steps"])
        if at >= steps:
            return None
        if at < 0 or self.given["warmup_type"] == "linear":
            return max(0, at) / float(steps)
        return math.log(at + 1) * (1.0 / math.log(steps))  # not a division: DeepSpeed's bits

    def _left(self) -> float:
        """Calls from the end of the warm-up to total_num_steps."""
        return max(1.0, self.given["total_num_steps"] - max(2, self.given["warmup_num_steps"]))


class WarmupLR(Schedule):
    """From warmup_min_lr to warmup_max_lr in warmup_num_steps calls, by the logarithm or linearly, then constant.

    warmup_max_lr: None is each group's own lr.
    """

    PARAMS = {
        "warmup_min_lr": mapped(numbers(), 0.0),
        "warmup_max_lr": mapped(numbers()),
        "warmup_num_steps": mapped(whole(1, exponent=False), 1000),
        "warmup_type": mapped(one_of("log", "linear"), "log"),
    }

    def get_lr(self) -> list[Any]:
        part = self._warm(self.last_batch_iteration)
        part = self._after(self.last_batch_iteration) if part is None else part
        ends = zip(self._each("warmup_min_lr"), self._each("warmup_max_lr"), strict=True)
        return [low + (high - low) * part for low, high in ends]

    def _after(self, at: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """As WarmupLR, then linearly down to warmup_min_lr at call total_num_steps."""

    PARAMS = {"total_num_steps": mapped(whole(1)), **WarmupLR.PARAMS, "warmup_max_lr": mapped(numbers(), 1e-3)}
    needs = 1

    def _after(self, at: int) -> float:
        return max(0.0, (self.given["total_num_steps"] - at) / self._left())


class WarmupCosineLR(Schedule):
    """Each group's own lr times a ratio: up from warmup_min_ratio to 1, then down a cosine to cos_min_ratio."""

    PARAMS = {
        "total_num_steps": mapped(whole(1)),
        "warmup_min_ratio": mapped(number(), 0.0),
        "warmup_num_steps": mapped(whole(1, exponent=False), 1000),
        "cos_min_ratio": mapped(number(), 1e-4),
        "warmup_type": mapped(one_of("log", "linear"), "log"),
    }
    needs = 1

    def get_lr(self) -> list[Any]:
        at, start, end = self.last_batch_iteration, self.given["warmup_min_ratio"], self.given["cos_min_ratio"]
        part = self._warm(at)
        if at < 0:
            ratio = 0.0  # not warmup_min_ratio: so the first step of a run changes nothing
        elif part is not None:
            ratio = start + part * (1.0 - start)
        else:
            done = min(1.0, (at - max(2, self.given["warmup_num_steps"]) + 1) / self._left())
            ratio = max(0.0, end + (1.0 - end) * ((1 + math.cos(math.pi * done)) / 2))
        return [rate * ratio for rate in self.own]


class LRRangeTest(Schedule):
    """Grows by lr_range_test_step_rate times the first learning rate in each lr_range_test_step_size calls."""

    PARAMS = {
        "lr_range_test_min_lr": mapped(numbers(), 1e-3),
        "lr_range_test_step_size": mapped(whole(1, exponent=False), 2000),
        "lr_range_test_step_rate": mapped(number(-math.inf), 1.0),
        "lr_range_test_staircase": mapped(flag, False),
    }

    def get_lr(self) -> list[Any]:
        lowest, size, rate, stairs = self.given.values()
        done = (self.last_batch_iteration + 1) / size
        grown = 1 + rate * (math.floor(done) if stairs else done)
        return [low * grown for low in self._each("lr_range_test_min_lr")]


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
    needs = 2

    def get_lr(self) -> list[Any]:
        """Also sets the momenta, as torch's OneCycleLR does."""
        at, given = self.last_batch_iteration, self.given
        first = float(given["cycle_first_step_size"])
        second = first if given["cycle_second_step_size"] is None else float(given["cycle_second_step_size"])
        rates = list(zip(self._each("cycle_min_lr"), self._each("cycle_max_lr"), strict=True))
        momenta = list(zip(self._each("cycle_min_mom"), self._each("cycle_max_mom"), strict=True))
        if at < 0:
            self._set_momenta([low for low, _ in momenta])
            return [low for low, _ in rates]
        # A rate of 0 stops that decay, and no decay_step_size both. DeepSpeed then stays at the least rate.
        if at < first + second:
            part = self._part(at + 1, first, second)
            self._set_momenta([high - (high - low) * part for low, high in momenta])
            return [low + (high - low) * part for low, high in rates]
        size = given["decay_step_size"]
        intervals = (at - (first + second) + 1) / size if size else 0.0
        self._set_momenta([high * (1 + given["decay_mom_rate"] * intervals) for _, high in momenta])
        return [low / (1 + given["decay_lr_rate"] * intervals) for low, _ in rates]

    def _part(self, at: int, first: float, second: float) -> float:
        """How far up the rate is, of 1."""
        total = first + second
        turn = first / total
        x = 1.0 + at / total - math.floor(1 + at / total)
        up, down = self.given["cycle_first_stair_count"], self.given["cycle_second_stair_count"]
        part, stairs = (x / turn, up) if x <= turn else ((x - 1) / (turn - 1), up if down is None else down)
        if stairs:  # counted in whole calls: at a turn, `part` may be just below 1
            inside = at % total
            part = math.floor((inside / first if inside <= first else (total - inside) / second) * stairs) / stairs
        return part

    def _set_momenta(self, momenta: list[float]) -> None:
        if self.given["cycle_momentum"] and "betas" in self.optimizer.defaults:
            for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = (momentum, 0.99)


SCHEDULES: dict[str, type[Schedule]] = {
    made.__name__: made for made in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


# They take a metric, functions or other schedulers.
_NOT_FROM_JSON = ("ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler")


def _torchs(name: str) -> dict[str, inspect.Parameter] | None:
    """Parameters of a class of torch.optim.lr_scheduler; None: there is none, or it does not go into a JSON."""
    made = getattr(torch.optim.lr_scheduler, name, None)
    taken = isinstance(made, type) and issubclass(made, LRScheduler) and made is not LRScheduler
    if not taken or name in _NOT_FROM_JSON:
        return None
    return dict(list(inspect.signature(cast(type, made)).parameters.items())[1:])


def params_of(name: str) -> dict[str, Key] | None:
    """Returns the parameters of a type of DeepSpeed's, or of a class of torch.optim.lr_scheduler; None: not known."""
    if name in SCHEDULES:
        return SCHEDULES[name].PARAMS
    found = _torchs(name)
    return None if found is None else dict.fromkeys(found, mapped(anything))


def needed_by(name: str) -> list[str]:
    """Returns the parameters without a default of a type that params_of knows."""
    if name in SCHEDULES:
        return list(SCHEDULES[name].PARAMS)[: SCHEDULES[name].needs]
    return [key for key, taken in (_torchs(name) or {}).items() if taken.default is inspect.Parameter.empty]


def make(name: str, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> LRScheduler:
    made: Any = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name)
    return made(optimizer, **given)

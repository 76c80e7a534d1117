"""Describes each optimizer: its states, its options, and the options it refuses. Data only, no tensors.

A rule is looked up by the exact type of an optimizer, because a subclass may override ``step``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zero_optim_cpu import _native


@dataclass(frozen=True)
class Rule:
    """One optimizer's arithmetic.

    Attributes:
        name: the name that errors use.
        code: the native ``Rule``.
        states: the names of the states and their native slots. Slot 0 holds signed moments, slot 1 unsigned ones.
        numbers: the options of a param group that are plain numbers.
        decoupled: whether weight decay is applied to the parameter, unless the param group says.
    """

    name: str
    code: int
    states: tuple[tuple[str, int], ...]
    numbers: tuple[str, ...]
    decoupled: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.states)

    def hyper(self, options: Mapping[str, Any], step: int) -> Any:
        """Returns the native record of a param group's options in a step, which counts from 1."""
        values = {name: float(options[name]) for name in self.numbers}
        if "betas" in options:
            values["beta1"], values["beta2"] = map(float, options["betas"])
        if not self.states and values["momentum"] != 0.0:
            raise ValueError(
                f"SGD was bound without momentum and now has momentum={options['momentum']}: there is no buffer for "
                "it; give some param group a momentum before bind()"
            )
        return _native.Hyper(
            **values,
            step=step,
            decoupled=bool(options.get("decoupled_weight_decay", self.decoupled)),
            nesterov=bool(options.get("nesterov", False)),
            maximize=bool(options.get("maximize", False)),
        )


_ADAM_STATES, _ADAM_NUMBERS = (("exp_avg", 0), ("exp_avg_sq", 1)), ("lr", "eps", "weight_decay")
_SGD_NUMBERS = ("lr", "momentum", "dampening", "weight_decay")
ADAM = Rule("Adam", 0, _ADAM_STATES, _ADAM_NUMBERS)
ADAMW = Rule("AdamW", 0, _ADAM_STATES, _ADAM_NUMBERS, decoupled=True)
LION = Rule("Lion", 1, (("exp_avg", 0),), ("lr", "weight_decay"), decoupled=True)
ADAGRAD = Rule("Adagrad", 2, (("sum", 1),), ("lr", "lr_decay", "eps", "weight_decay"))
SGD_MOMENTUM = Rule("SGD", 3, (("momentum_buffer", 0),), _SGD_NUMBERS)
SGD_PLAIN = Rule("SGD", 4, (), _SGD_NUMBERS)

_KNOWN = "Adagrad, Adam, AdamW and SGD of torch.optim and of zero_optim_cpu, and zero_optim_cpu.Lion"
_BY_TYPE: dict[type, Rule] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAMW,
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.SGD: SGD_MOMENTUM,
}

# Options that change the arithmetic and have no kernel. False turns them off.
_REFUSED = ("amsgrad", "differentiable")


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Returns the rule of an optimizer, after checking its param groups.

    It is one of torch's types, or a class of this package that declares its ``rule``.

    Raises:
        TypeError: the type is unknown. The text lists the known ones.
        ValueError: a param group sets an option that has no kernel.
    """
    kind = type(optimizer)
    rule = _BY_TYPE.get(kind) or vars(kind).get("rule")
    if not isinstance(rule, Rule):
        for name, inner in vars(optimizer).items():
            if isinstance(inner, torch.optim.Optimizer):  # accelerate's, for one
                raise TypeError(f"{kind.__name__} wraps the {type(inner).__name__} in its .{name}: bind that one")
        raise TypeError(f"no CPU kernel for optimizer {kind.__module__}.{kind.__qualname__}; there are {_KNOWN}")
    refuse_options(rule, optimizer.param_groups)
    return rule_in_use(rule, optimizer.param_groups)


def rule_in_use(rule: Rule, groups: Iterable[Mapping[str, Any]]) -> Rule:
    """Returns the rule itself, or for SGD without momentum in any param group the rule that has no buffer."""
    if rule is SGD_MOMENTUM and not any(float(group["momentum"]) for group in groups):
        return SGD_PLAIN
    return rule


def refuse_options(rule: Rule, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValueError if a param group sets an option that has no kernel."""
    for index, group in enumerate(groups):
        for option in _REFUSED:
            if group.get(option, False):
                raise ValueError(
                    f"{rule.name} with {option}={group[option]!r} (param group {index}) has no CPU kernel; "
                    "set it to False"
                )

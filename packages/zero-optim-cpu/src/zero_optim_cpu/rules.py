"""What each optimizer is: its states, its options, and what it refuses. Data, no tensors.

A rule is found by the exact type of the optimizer: a subclass may have another ``step``, which could not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zero_optim_cpu import _native


@dataclass(frozen=True)
class Rule:
    """One optimizer's arithmetic.

    Attributes:
        name: as errors say it.
        code: the native ``Rule``.
        states: logical names and the native slot of each: slot 0 holds signed moments, slot 1 unsigned ones.
        hyper: ``(options of a param group, 1-based step)`` to the native record.
    """

    name: str
    code: int
    states: tuple[tuple[str, int], ...]
    hyper: Callable[[Mapping[str, Any], int], Any]

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.states)


def _adam_hyper(decoupled: bool) -> Callable[[Mapping[str, Any], int], Any]:
    def hyper(options: Mapping[str, Any], step: int) -> Any:
        beta1, beta2 = options["betas"]
        return _native.Hyper(
            lr=float(options["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(options["eps"]),
            weight_decay=float(options["weight_decay"]),
            decoupled=bool(options.get("decoupled_weight_decay", decoupled)),
            maximize=bool(options.get("maximize", False)),
            step=step,
        )

    return hyper


def _lion_hyper(options: Mapping[str, Any], step: int) -> Any:
    beta1, beta2 = options["betas"]
    return _native.Hyper(
        lr=float(options["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=float(options["weight_decay"]),
        decoupled=True,
        maximize=bool(options.get("maximize", False)),
        step=step,
    )


def _adagrad_hyper(options: Mapping[str, Any], step: int) -> Any:
    return _native.Hyper(
        lr=float(options["lr"]),
        lr_decay=float(options["lr_decay"]),
        eps=float(options["eps"]),
        weight_decay=float(options["weight_decay"]),
        maximize=bool(options.get("maximize", False)),
        step=step,
    )


def _sgd_hyper(options: Mapping[str, Any], step: int) -> Any:
    return _native.Hyper(
        lr=float(options["lr"]),
        momentum=float(options["momentum"]),
        dampening=float(options["dampening"]),
        nesterov=bool(options["nesterov"]),
        weight_decay=float(options["weight_decay"]),
        maximize=bool(options.get("maximize", False)),
        step=step,
    )


def _plain_sgd_hyper(options: Mapping[str, Any], step: int) -> Any:
    if float(options["momentum"]) != 0.0:
        raise ValueError(
            f"SGD was bound without momentum and now has momentum={options['momentum']}: there is no buffer for it; "
            "give some param group a momentum before bind()"
        )
    return _sgd_hyper(options, step)


ADAM = Rule("Adam", 0, (("exp_avg", 0), ("exp_avg_sq", 1)), _adam_hyper(decoupled=False))
ADAMW = Rule("AdamW", 0, (("exp_avg", 0), ("exp_avg_sq", 1)), _adam_hyper(decoupled=True))
LION = Rule("Lion", 1, (("exp_avg", 0),), _lion_hyper)
ADAGRAD = Rule("Adagrad", 2, (("sum", 1),), _adagrad_hyper)
SGD_MOMENTUM = Rule("SGD", 3, (("momentum_buffer", 0),), _sgd_hyper)
SGD_PLAIN = Rule("SGD", 4, (), _plain_sgd_hyper)

_BY_TYPE: dict[type, Rule] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAMW,
    torch.optim.Adagrad: ADAGRAD,
    torch.optim.SGD: SGD_MOMENTUM,
}

# Options that change the arithmetic and have no kernel. Their neutral value is False.
_REFUSED = ("amsgrad", "differentiable")


def register(kind: type, rule: Rule) -> None:
    """Let ``kind`` (one of this package's optimizers) be recognised by ``rule_of``."""
    _BY_TYPE[kind] = rule


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of an optimizer, its groups checked.

    SGD has a momentum buffer if any of its groups has a momentum.

    Raises:
        TypeError: the type is not one of those known; the text lists them.
        ValueError: a group sets an option that has no kernel.
    """
    rule = _BY_TYPE.get(type(optimizer))
    if rule is None:
        known = ", ".join(sorted({f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in _BY_TYPE}))
        kind = type(optimizer)
        for name, inner in vars(optimizer).items():
            if isinstance(inner, torch.optim.Optimizer):  # accelerate's, for one
                raise TypeError(f"{kind.__name__} wraps the {type(inner).__name__} in its .{name}: bind that one")
        raise TypeError(f"no CPU kernel for optimizer {kind.__module__}.{kind.__qualname__}; there are {known}")
    refuse_options(rule, optimizer.param_groups)
    return rule_in_use(rule, optimizer.param_groups)


def rule_in_use(rule: Rule, groups: Iterable[Mapping[str, Any]]) -> Rule:
    """SGD without a momentum in any group has no buffer; every other rule is itself."""
    if rule is SGD_MOMENTUM and not any(float(group["momentum"]) for group in groups):
        return SGD_PLAIN
    return rule


def refuse_options(rule: Rule, groups: Iterable[Mapping[str, Any]]) -> None:
    """ValueError if a param group sets an option that has no kernel."""
    for index, group in enumerate(groups):
        for option in _REFUSED:
            if group.get(option, False):
                raise ValueError(
                    f"{rule.name} with {option}={group[option]!r} (param group {index}) has no CPU kernel; "
                    "set it to False"
                )

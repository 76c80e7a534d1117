"""DeepSpeed's types of optimizers as torch's: which there are, what parameters they take, and how one is made."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_core.errors import ConfigError

from .keys import Key, mapped, needless, refused
from .values import anything, flag, number, numbers

__all__ = ["REFUSED", "Kind", "kind_of"]

REFUSED = {
    "lamb": "it scales each step by norms of whole parameters, and a rank has slices of them: take AdamW",
    "onebitadam": "its gradients are compressed to one bit: take Adam",
    "onebitlamb": "its gradients are compressed to one bit: take AdamW",
    "zerooneadam": "its gradients are compressed to one bit: take Adam",
    "muon": "it is for some matrices, and the file does not say for which: take AdamW",
    "lbfgs": "it looks at all parameters together, and a rank has slices of them: take AdamW",
    "sparseadam": "gradients are dense here: take Adam",
    "adafactor": "it looks at rows and columns, and a rank has slices: take AdamW",
    **dict.fromkeys(
        ("muadam", "muadamw", "musgd"), "muP's scaling is not here: build mup's optimizer, and give it to initialize()"
    ),
    **dict.fromkeys(("adam8bit", "fusedadam8bit"), "its states are quantised in blocks: take AdamW"),
}
_CLIPPING = "DeepSpeed refuses it, too: write gradient_clipping at the top of the file"


@dataclass(frozen=True)
class Kind:
    """One type of optimizer: what its parameters become, its class here, and how it is made of the values."""

    ours: Callable[[Mapping[str, Any]], str]
    make: Callable[[Any, Mapping[str, Any]], torch.optim.Optimizer]
    params: dict[str, Key] = field(default_factory=dict)


_COMMON = {
    "lr": mapped(number(), 1e-3),
    "weight_decay": mapped(number(), 0.0),
    "max_grad_norm": refused(_CLIPPING, lambda value: False),
    "fp32_optimizer_states": refused(
        "states in the parameters' dtype are not here: leave it out; states are in fp32", lambda value: value is True
    ),
    "set_grad_none": needless("gradients leave for the shards as they arrive"),
}
_ADAM = _COMMON | {
    "betas": mapped(numbers(2), (0.9, 0.999)),
    "eps": mapped(number(), 1e-8),
    "adam_w_mode": mapped(flag, True),
    "torch_adam": mapped(flag, False),
    "bias_correction": refused(
        "torch's Adam always corrects the bias: leave it out, or write true", lambda value: value is True
    ),
    "amsgrad": mapped(flag, False),
    "foreach": needless("one kernel updates a whole tile"),
    "fused": needless("one kernel updates a whole tile"),
}


def _adam(name: str) -> Kind:
    def decoupled(given: Mapping[str, Any]) -> bool:
        return name == "adamw" or given.get("adam_w_mode", True)

    def make(parameters: Any, given: Mapping[str, Any]) -> torch.optim.Optimizer:
        made = torch.optim.AdamW if decoupled(given) else torch.optim.Adam
        decay = 0.01 if given.get("torch_adam") and decoupled(given) else 0.0  # DeepSpeed's own defaults to 0
        taken = {key: value for key, value in given.items() if key not in ("adam_w_mode", "torch_adam")}
        return made(parameters, **{"weight_decay": decay, **taken})

    return Kind(lambda given: f"torch.optim.{'AdamW' if decoupled(given) else 'Adam'}", make, _ADAM)


def _adagrad(parameters: Any, given: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, **{"lr": 1e-2, "eps": 1e-10, **given})


def _lion(parameters: Any, given: Mapping[str, Any]) -> torch.optim.Optimizer:
    """zero-optim-cpu's, as torch has none. It takes CPU tensors only, and the model may have no memory yet."""
    try:
        lion: Any = importlib.import_module("zero_optim_cpu").Lion
    except ImportError:
        raise ConfigError("Lion is zero_optim_cpu.Lion: install zero-optim-cpu, or take AdamW") from None
    items = list(parameters)
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    stand_ins = [{**group, "params": [torch.zeros(1, requires_grad=True)]} for group in groups]
    made: torch.optim.Optimizer = lion(stand_ins, **{"lr": 1e-3, "betas": (0.9, 0.999), **given})
    for ours, group in zip(made.param_groups, groups, strict=True):
        ours["params"] = list(group["params"])
    return made


_KINDS = {
    "adam": _adam("adam"),
    "adamw": _adam("adamw"),
    "adagrad": Kind(
        lambda given: "torch.optim.Adagrad",
        _adagrad,
        _COMMON
        | {
            "lr": mapped(number(), 1e-2),
            "eps": mapped(number(), 1e-10),
            "lr_decay": mapped(number(), 0.0),
            "initial_accumulator_value": mapped(number(), 0.0),
            "amsgrad": needless("DeepSpeed does nothing with it"),
        },
    ),
    "lion": Kind(lambda given: "zero_optim_cpu.Lion", _lion, _COMMON | {"betas": mapped(numbers(2), (0.9, 0.999))}),
}


def kind_of(name: str) -> Kind | None:
    """Returns what a type of DeepSpeed's is, which may be the name of a class of torch.optim; None: there is none."""
    if name.lower() in _KINDS:
        return _KINDS[name.lower()]
    made = getattr(torch.optim, name, None)
    if (
        name.lower() in REFUSED
        or not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer))
        or made is torch.optim.Optimizer
    ):
        return None
    known = {
        key: mapped(numbers(2) if key == "betas" else _COMMON[key].takes if key in _COMMON else anything, taken.default)
        for key, taken in list(inspect.signature(made).parameters.items())[1:]
    }
    return Kind(
        lambda given: f"torch.optim.{name}",
        lambda parameters, given: made(parameters, **given),
        _COMMON | known,
    )

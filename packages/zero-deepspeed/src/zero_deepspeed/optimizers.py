"""DeepSpeed's types of optimizers as torch's: which there are, what parameters they take, and how one is made."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from zero_core.errors import ConfigError

from .keys import Key, mapped, needless, refused
from .values import anything, flag, number, numbers

__all__ = ["REFUSED", "make", "params_of"]

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


_PARAMS = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "adagrad": _COMMON
    | {
        "lr": mapped(number(), 1e-2),
        "eps": mapped(number(), 1e-10),
        "lr_decay": mapped(number(), 0.0),
        "initial_accumulator_value": mapped(number(), 0.0),
        "amsgrad": needless("DeepSpeed does nothing with it"),
    },
    "lion": _COMMON | {"betas": mapped(numbers(2), (0.9, 0.999))},
}


def params_of(name: str) -> dict[str, Key] | None:
    """Returns the parameters of a type of DeepSpeed's, or of a class of torch.optim; None: there is none."""
    if name.lower() in _PARAMS:
        return _PARAMS[name.lower()]
    made: Any = getattr(torch.optim, name, None)
    known = isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and made is not torch.optim.Optimizer
    if name.lower() in REFUSED or not known:
        return None
    return _COMMON | {
        key: mapped(numbers(2) if key == "betas" else _COMMON[key].takes if key in _COMMON else anything, taken.default)
        for key, taken in list(inspect.signature(made).parameters.items())[1:]
    }


def make(name: str, parameters: Any, given: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Returns an optimizer of a type that `params_of` knows, with DeepSpeed's defaults."""
    kind = name.lower()
    if kind in ("adam", "adamw"):
        decoupled = kind == "adamw" or given.get("adam_w_mode", True)
        decay = 0.01 if given.get("torch_adam") and decoupled else 0.0  # DeepSpeed's own defaults to 0
        taken = {key: value for key, value in given.items() if key not in ("adam_w_mode", "torch_adam")}
        made = torch.optim.AdamW if decoupled else torch.optim.Adam
        return made(parameters, **{"weight_decay": decay, **taken})
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, **{"lr": 1e-2, "eps": 1e-10, **given})
    return _lion(parameters, given) if kind == "lion" else getattr(torch.optim, name)(parameters, **given)

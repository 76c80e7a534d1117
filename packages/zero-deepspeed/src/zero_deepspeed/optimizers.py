"""DeepSpeed's types of optimizers as torch's: which there are, what parameters they take, and how one is made."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from zero_core.errors import ConfigError

from .keys import Key, anything, flag, needless, number, numbers, refused

__all__ = ["TYPES", "make", "params_of"]

# Those of torch's that look at one element at a time. DeepSpeed's own names come in any case.
_TORCHS = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
TYPES = (*_TORCHS, "Lion")
_CHECKS = {"lr": number(), "weight_decay": number(), "betas": numbers(2), "eps": number(), "amsgrad": flag}
_TILES = needless("one kernel updates a whole tile")
_COMMON = {
    "foreach": _TILES,
    "fused": _TILES,
    "set_grad_none": needless("gradients leave for the shards as they arrive"),
    "max_grad_norm": refused("DeepSpeed refuses it, too: write gradient_clipping at the top of the file", off="never"),
    "fp32_optimizer_states": refused("states are in fp32: leave it out", off="true"),
}
_ADAM = {
    "weight_decay": Key(number(), 0.0),
    "adam_w_mode": Key(flag, True),
    "torch_adam": Key(flag, False),
    "bias_correction": refused("torch's Adam always corrects the bias: leave it out, or write true", off="true"),
}
_LION = {"lr": Key(number(), 1e-3), "betas": Key(numbers(2), (0.9, 0.999)), "weight_decay": Key(number(), 0.0)}
_DEEPSPEEDS = {  # its own classes take these, and not what torch's take besides
    **dict.fromkeys(("adam", "adamw"), _ADAM),
    "adagrad": {"amsgrad": needless("DeepSpeed does nothing with it")},
    "lion": _LION,
}
_TORCHS_ALONE = ("maximize", "capturable", "differentiable")


def _class(name: str) -> Any:
    called = {"adam": "AdamW", "adamw": "AdamW", "adagrad": "Adagrad"}.get(name.lower(), name)
    return getattr(torch.optim, called) if called in _TORCHS else None


def params_of(name: str) -> dict[str, Key] | None:
    """Returns the parameters of one of TYPES; None: it is none of them."""
    kind, made = name.lower(), _class(name)
    if made is None and kind != "lion":
        return None
    taken = list(inspect.signature(made).parameters.items())[1:] if made is not None else []
    found = {key: Key(_CHECKS.get(key, anything), each.default) for key, each in taken}
    own = _DEEPSPEEDS.get(kind)
    if own is not None:
        found = {key: each for key, each in found.items() if key not in _TORCHS_ALONE} | own
    return found | _COMMON


def make(name: str, parameters: Any, given: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Returns an optimizer of one of TYPES, with DeepSpeed's defaults."""
    kind, options = name.lower(), dict(given)
    if kind == "lion":
        return _lion(parameters, options)
    made = _class(name)
    if kind in ("adam", "adamw"):
        modes = options.pop("adam_w_mode", True), options.pop("torch_adam", False)
        made = torch.optim.AdamW if kind == "adamw" or modes[0] else torch.optim.Adam
        decay = 0.01 if modes[1] and made is torch.optim.AdamW else 0.0  # DeepSpeed's own defaults to 0
        options = {"weight_decay": decay, **options}
    optimizer: torch.optim.Optimizer = made(parameters, **options)
    return optimizer


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

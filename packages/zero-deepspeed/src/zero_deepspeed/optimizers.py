"""Makes torch's optimizers for DeepSpeed's optimizer types, and lists the parameters of each type."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch

from zero_core.errors import ConfigError

# torch's elementwise optimizers. DeepSpeed's own names may be in any case.
_TORCHS = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
TYPES = (*_TORCHS, "Lion")
_DEEPSPEEDS = {"adam": "Adam", "adamw": "AdamW", "adagrad": "Adagrad", "lion": "Lion"}
_ADAM = {"weight_decay": 0.0, "adam_w_mode": True, "torch_adam": False}  # DeepSpeed's own parameters and defaults
_LION = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}


def defaults_of(name: str) -> dict[str, Any] | None:
    """Returns the parameters of one of TYPES, with their defaults; None: it is none of them."""
    name = _DEEPSPEEDS.get(name.lower(), name)
    if name not in _TORCHS:
        return dict(_LION) if name == "Lion" else None
    taken = inspect.signature(getattr(torch.optim, name)).parameters
    found = {key: each.default for key, each in taken.items() if key != "params"}
    return found | _ADAM if name in ("Adam", "AdamW") else found


def make(name: str, parameters: Any, given: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Returns an optimizer of one of TYPES, with DeepSpeed's defaults."""
    name, options = _DEEPSPEEDS.get(name.lower(), name), dict(given)
    if name == "Lion":
        return _lion(parameters, _LION | options)
    if name in ("Adam", "AdamW"):
        decoupled, torchs = options.pop("adam_w_mode", True), options.pop("torch_adam", False)
        name = "AdamW" if decoupled else name
        options.setdefault("weight_decay", 0.01 if torchs and name == "AdamW" else 0.0)  # DeepSpeed's own defaults to 0
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, **options)
    return optimizer


def _lion(parameters: Any, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    try:
        lion: Any = importlib.import_module("zero_optim_cpu").Lion.over
    except ImportError:
        raise ConfigError('Lion needs the package zero-optim-cpu: install it, or write "type": "AdamW"') from None
    return cast(torch.optim.Optimizer, lion(parameters, **options))

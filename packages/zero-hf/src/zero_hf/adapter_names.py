"""Finds the names of the parameters that belong to a model's PEFT adapters. Copies no weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn


def adapters_of(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of PEFT's adapters in the model."""
    return tuple(getattr(model, "peft_config", None) or ())


def written_with_adapters(model: nn.Module) -> Callable[[str], bool]:
    """Returns a predicate on parameter names: whether PEFT writes the parameter into an adapter's files. Collective.

    PEFT also writes parameters that are not trained: an embedding that was resized or that an adapter targets, and
    projections that all layers share. PEFT makes the choice from stand-ins of the same shapes, on rank 0 for all ranks,
    because it may ask the Hub for the base model's configuration.
    """
    wanted: set[str] = set()
    if adapters := adapters_of(model):
        from peft import get_peft_model_state_dict

        state: dict[str, Any] = {
            name: torch.zeros(()).expand(value.shape) if isinstance(value, Tensor) else value
            for name, value in model.state_dict(keep_vars=True).items()
        }
        names = {id(value): name for name, value in state.items()}
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # PEFT says the same again when it writes
            for adapter in adapters:
                chosen = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
                wanted |= {names[id(value)] for value in chosen.values() if id(value) in names}
        wanted = broadcast_object_list([wanted])[0]
    return wanted.__contains__

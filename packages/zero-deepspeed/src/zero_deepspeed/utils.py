"""Offers zero_core's functions for one parameter's values under the names of deepspeed.utils.

All are collective, take a sharded parameter, and give and take its whole value in fp32.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import Parameter

import zero_core

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]


safe_get_full_grad, safe_set_full_grad = zero_core.full_gradient, zero_core.set_full_gradient


def safe_get_full_fp32_param(param: Parameter) -> Tensor | None:
    """The fp32 master; None: the parameter is frozen."""
    return zero_core.full_state(param, "master")


def safe_set_full_fp32_param(param: Parameter, value: Tensor) -> None:
    zero_core.set_full_state(param, "master", value)


def safe_get_full_optimizer_state(param: Parameter, optim_state_key: str) -> Tensor | None:
    """A state such as "exp_avg"; None before the parameter's first step."""
    return zero_core.full_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: Parameter, value: Tensor, optim_state_key: str) -> None:
    zero_core.set_full_state(param, optim_state_key, value)

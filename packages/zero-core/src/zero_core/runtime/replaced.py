"""Makes the user's optimizer, which `shard` has replaced, raise where it is stepped, saved or extended.

Owns that refusal. `param_groups` stay live and `zero_grad` works, because the sharded optimizer has the same groups.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from ..errors import ZeroError

__all__ = ["is_refusal", "replace_optimizer", "wrapped_in"]

# Methods of a user's class that stores and `zero_core.optim` call, before shard() and after it.
_ASKED = ("needs_uncut", "steps_rows", "scratch_bytes", "step_flop")


def replace_optimizer(optimizer: torch.optim.Optimizer, sharded: torch.optim.Optimizer) -> None:
    """Makes the optimizer raise and name the sharded one, rather than step nothing or save no state.

    `sharded` refuses the other methods of its class too: code that looks for one before calling it, as a Trainer for
    train() and eval() of schedule-free optimizers, would go on without it.
    """
    for name in ("step", "state_dict", "load_state_dict", "add_param_group"):
        optimizer.__dict__[name] = MethodType(_refusal(name), optimizer)
    functions = {n for kind in type(optimizer).__mro__ for n, v in vars(kind).items() if inspect.isfunction(v)}
    for name in functions.difference(_ASKED, vars(torch.optim.Optimizer)):
        if not name.startswith("_"):
            refusal = optimizer.__dict__[name] = MethodType(_refusal_of_own(name), optimizer)
            if not hasattr(sharded, name):
                sharded.__dict__[name] = refusal
    optimizer.__dict__["_opt_called"] = True  # a scheduler built on it before would warn that nobody steps it


def _refusal(name: str) -> Callable[..., Any]:
    def refuse(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        raise ZeroError(
            f"{name}() was called on the {type(optimizer).__name__} that was given to zero_core.shard, which returned "
            f"another optimizer in its place: write `optimizer = zero_core.shard(model, optimizer, ...)` and call "
            f"{name}() on that one"
        )

    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as a scheduler leaves it, and looks for
    return refuse


def _refusal_of_own(name: str) -> Callable[..., Any]:
    def refuse(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        raise ZeroError(
            f"{name}() of {type(optimizer).__name__} was called after zero_core.shard, where gradients and states lie "
            "in shards and it would find none: call it before zero_core.shard, or from its step()"
        )

    refuse._zero_refusal = True  # type: ignore[attr-defined]
    return refuse


def is_refusal(value: Any) -> bool:
    """Whether an attribute of an optimizer refuses a method of the user's class. Copies over shards have the method."""
    return isinstance(value, MethodType) and hasattr(value, "_zero_refusal")


def wrapped_in(optimizer: torch.optim.Optimizer) -> tuple[str, torch.optim.Optimizer] | None:
    """Returns the attribute in which an optimizer holds another one, and that one; accelerate's is `optimizer`."""
    held = ((k, v) for k, v in vars(optimizer).items() if isinstance(v, torch.optim.Optimizer))
    return next(held, None)

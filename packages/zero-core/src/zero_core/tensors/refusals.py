"""Raises a clear error where a sharded module is copied or scripted, or the replaced optimizer is used.

Owns the methods that it puts on them, and their removal from modules. Not here: copies of parameters (in
sharded_parameter.py). The optimizer's `param_groups` stay live and `zero_grad` works, because the sharded optimizer has
the same groups.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..errors import GradientError, ShardedParameterError, UnsupportedOptimizerError, ZeroError

_REFUSED = "_zero_refused"  # attribute with the module's own methods, which are replaced meanwhile


def refuse_copies(module: nn.Module) -> None:
    """Makes deepcopy and pickle of a module that opens units raise with the reason, before its hooks would fail."""
    why = (
        f"a sharded {type(module).__name__} cannot be copied or pickled, because its values are in shards. Copy it "
        "before zero_core.shard, or load model.state_dict() into a new model. To save it, use "
        "zero_core.checkpoint.save. To average weights over steps, use zero_core.AveragedModel"
    )
    _refuse(module, why, "__deepcopy__", "__reduce_ex__")


def refuse_scripts(module: nn.Module) -> None:
    """Makes torch.jit.script of a module with sharded parameters raise with the reason, before C++ reads them."""
    why = (
        f"torch.jit.script of a sharded {type(module).__name__}: its code would read parameters that have no memory "
        "between uses. Compile blocks with torch.compile. Or script a plain model that loads this one's state_dict()"
    )
    _refuse(module, why, "__prepare_scriptable__")


def _refuse(module: nn.Module, why: str, *names: str) -> None:
    """Makes the module's methods `names` raise, and keeps a user's own ones for `allow_copies`."""

    def refuse(*args: Any) -> Any:
        raise ShardedParameterError(why)

    own: dict[str, Any] = module.__dict__
    before = own.setdefault(_REFUSED, {})
    for name in names:
        if name not in before:
            before[name] = own.get(name)
        own[name] = refuse


def allow_copies(module: nn.Module) -> None:
    """Undoes `refuse_copies` and `refuse_scripts` on a module."""
    for name, before in module.__dict__.pop(_REFUSED, {}).items():
        del module.__dict__[name]
        if before is not None:
            module.__dict__[name] = before


def refuse_grad_dtype(name: str, wanted: torch.dtype | None, dtype: torch.dtype) -> None:
    raise GradientError(
        f"p.grad_dtype = {wanted} for {name}: p.grad of a sharded parameter has the parameter's dtype, {dtype}. "
        "Remove this line, and pass reduce_dtype= to zero_core.shard for the dtype of the sharded gradients. Read them "
        "with zero_core.full_gradient(p), in fp32"
    )


def refuse_optimizer(name: str) -> None:
    raise UnsupportedOptimizerError(
        f"torch.distributed.optim._apply_optimizer_in_backward was called for {name}: its optimizer and that of "
        "zero_core.shard would both step the parameter. Leave the call out, and pass update_in_backward=True to shard()"
    )


# Methods of a user's class that stores and `zero_core.optim` call, before shard() and after it.
_ASKED = ("needs_uncut", "steps_rows", "scratch_bytes", "step_flop")


def replace_optimizer(optimizer: torch.optim.Optimizer, sharded: torch.optim.Optimizer) -> None:
    """Makes the optimizer raise and name the sharded one, rather than step nothing or save no state.

    `sharded` refuses the other methods of its class too: code that looks for one before calling it, as a Trainer for
    train() and eval() of schedule-free optimizers, would go on without it.
    """
    kind = type(optimizer).__name__
    for name in ("step", "state_dict", "load_state_dict", "add_param_group"):
        optimizer.__dict__[name] = _refusal(
            optimizer,
            f"{name}() was called on the {kind} that was given to zero_core.shard, which returned another optimizer in "
            f"its place: write `optimizer = zero_core.shard(model, optimizer, ...)` and call {name}() on that one",
        )
    functions = {n for kind in type(optimizer).__mro__ for n, v in vars(kind).items() if inspect.isfunction(v)}
    for name in functions.difference(_ASKED, vars(torch.optim.Optimizer)):
        if not name.startswith("_"):
            refusal = optimizer.__dict__[name] = _refusal(
                optimizer,
                f"{name}() of {kind} was called after zero_core.shard, which moved gradients and states into shards: "
                f"call {name}() before zero_core.shard, or from {kind}.step()",
            )
            if not hasattr(sharded, name):
                sharded.__dict__[name] = refusal
    optimizer.__dict__["_opt_called"] = True  # a scheduler built on it before would warn that nobody steps it


def _refusal(optimizer: torch.optim.Optimizer, why: str) -> MethodType:
    """Returns a method of the optimizer that raises ZeroError."""

    def refuse(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        raise ZeroError(why)

    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as a scheduler leaves step(), and looks for
    refuse._zero_refusal = True  # type: ignore[attr-defined]
    return MethodType(refuse, optimizer)


def is_refusal(value: Any) -> bool:
    """Whether an attribute of an optimizer refuses a method. Copies over shards have the method."""
    return isinstance(value, MethodType) and hasattr(value, "_zero_refusal")

"""Makes copies and scripts of sharded modules raise a clear error, and refuses hooks of torch's on their parameters.

Owns the methods that it puts on modules, and their removal. Not here: copies of parameters (in parameter.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import GradientError, ShardedParameterError, UnsupportedOptimizerError

__all__ = ["allow_copies", "refuse_copies", "refuse_grad_dtype", "refuse_optimizer", "refuse_scripts"]

_REFUSED = "_zero_refused"  # attribute with the module's own methods, which are replaced meanwhile


def refuse_copies(module: nn.Module) -> None:
    """Makes deepcopy and pickle of a module that opens units raise with the reason, before its hooks would fail."""
    kind = type(module).__name__

    def refuse(*args: Any) -> Any:
        raise ShardedParameterError(
            f"copying or pickling a sharded {kind}: its values are in shards. Copy it before zero_core.shard; to keep "
            "values, use zero_core.checkpoint.save, or torch.save(model.state_dict()) and load that into a new model; "
            "for an average of them over steps, zero_core.AveragedModel"
        )

    _refuse(module, refuse, "__deepcopy__", "__reduce_ex__")


def refuse_scripts(module: nn.Module) -> None:
    """Makes torch.jit.script of a module with sharded parameters raise with the reason, before C++ reads them."""
    kind = type(module).__name__

    def refuse() -> Any:
        raise ShardedParameterError(
            f"torch.jit.script of a sharded {kind}: compiled code would read parameters that have no memory between "
            "uses. Compile blocks with torch.compile, or script a plain model that loads this one's state_dict()"
        )

    _refuse(module, refuse, "__prepare_scriptable__")


def _refuse(module: nn.Module, refuse: Callable[..., Any], *names: str) -> None:
    """Replaces the module's methods `names` by `refuse`, and keeps a user's own ones for `allow_copies`."""
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
        f"p.grad_dtype = {wanted} for {name}: gradients leave for the shards during backward, and p.grad would be in "
        f"{dtype}. Pass reduce_dtype= to zero_core.shard for the dtype in which gradients are kept and stepped, and "
        "read them with zero_core.full_gradient(p), in fp32"
    )


def refuse_optimizer(name: str) -> None:
    raise UnsupportedOptimizerError(
        f"torch.distributed.optim._apply_optimizer_in_backward was called for {name}: its optimizer would step in "
        "backward what lies in shards, beside the optimizer of zero_core.shard. Leave it out, and pass "
        "update_in_backward=True to zero_core.shard"
    )

"""Makes copies and scripts of modules raise a clear error while their parameters are sharded.

Owns the methods that it puts on modules, and their removal. Not here: copies of parameters (in parameter.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import ShardedParameterError

__all__ = ["allow_copies", "refuse_copies", "refuse_scripts"]

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

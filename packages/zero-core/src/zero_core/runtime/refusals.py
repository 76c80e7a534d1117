"""Copies and scripts of modules with sharded parameters are refused in words, while the modules are sharded.

Owns what is put on a module for that, and its removal. Parameters refuse by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import ShardedParameterError

__all__ = ["allow_copies", "refuse_copies", "refuse_scripts"]

_REFUSED = "_zero_refused"  # what a module had in the place of what refuses copies of it


def refuse_copies(module: nn.Module) -> None:
    """Let deepcopy and pickle of a module that opens units say why not; its hooks would fail with less to say."""
    kind = type(module).__name__

    def refuse(*args: Any) -> Any:
        raise ShardedParameterError(
            f"copying or pickling a sharded {kind}: its values are in shards. Copy it before zero_core.shard; to keep "
            "values, use zero_core.checkpoint.save, or torch.save(model.state_dict()) and load that into a new model; "
            "for an average of them over steps, zero_core.AveragedModel"
        )

    _refuse(module, refuse, "__deepcopy__", "__reduce_ex__")


def refuse_scripts(module: nn.Module) -> None:
    """Let torch.jit.script of a module with sharded parameters say why not, before it reads them in C++."""
    kind = type(module).__name__

    def refuse() -> Any:
        raise ShardedParameterError(
            f"torch.jit.script of a sharded {kind}: compiled code would read parameters that have no memory between "
            "uses. Compile blocks with torch.compile, or script a plain model that loads this one's state_dict()"
        )

    _refuse(module, refuse, "__prepare_scriptable__")


def _refuse(module: nn.Module, refuse: Callable[..., Any], *names: str) -> None:
    """Put `refuse` in the place of what a user may have put on the module itself, for `allow_copies` to find."""
    own: dict[str, Any] = module.__dict__
    before = own.setdefault(_REFUSED, {})
    for name in names:
        if name not in before:
            before[name] = own.get(name)
        own[name] = refuse


def allow_copies(module: nn.Module) -> None:
    """Take back what `refuse_copies` and `refuse_scripts` did to a module."""
    for name, before in module.__dict__.pop(_REFUSED, {}).items():
        del module.__dict__[name]
        if before is not None:
            module.__dict__[name] = before

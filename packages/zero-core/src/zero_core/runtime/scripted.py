"""Lets functions under torch.jit.script ask the classes of their arguments, as torch's other functions do.

Owns the one method of torch's that is replaced. Without it, C++ reads a sharded parameter that has no memory, and what
a function writes into a view of one is lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .held import HeldGradient, HeldNorm
from .parameter import Sharded
from .views import View

__all__ = ["asking", "see_calls"]

_KINDS = (Sharded, View, HeldGradient, HeldNorm)


def asking(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(function, ...)`, which `__torch_function__` of the arguments of our classes makes, where there are some."""

    @functools.wraps(call)
    def asked(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = _first((*args, *kwargs.values()))
        if given is None:
            return call(function, *args, **kwargs)
        return type(given).__torch_function__(functools.partial(asked, function), (), args, kwargs)

    asked.__dict__["_asks"] = True
    return asked


def _first(values: Iterable[Any]) -> Any:
    """The first tensor of our classes in nested lists, tuples and dicts. Without pytree, which takes 10 us a call."""
    for value in values:
        if isinstance(value, (list, tuple, dict)):
            value = _first(value.values() if isinstance(value, dict) else value)
        if isinstance(value, _KINDS):
            return value
    return None


def see_calls() -> None:
    """Functions under torch.jit.script ask from here on, in all of the process."""
    kind: Any = torch._C.ScriptFunction
    if not hasattr(kind.__call__, "_asks"):
        kind.__call__ = asking(kind.__call__)

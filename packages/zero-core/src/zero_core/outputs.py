"""Finding and hooking the tensors that a module returned, whatever they are wrapped in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["hook_outputs", "not_traced", "tensors_of"]


def hook_outputs(output: Any, sequence: int, hook: Callable[[Tensor], Any]) -> bool:
    """Hook every tensor of `output` that was made since autograd's count was `sequence`; others only pass through."""
    found = False
    for tensor in tensors_of(output):
        made = tensor.grad_fn
        if made is not None and made._sequence_nr() >= sequence:
            tensor.register_hook(hook)
            found = True
    return found


def tensors_of(value: Any, depth: int = 5) -> Iterator[Tensor]:
    """Every tensor in nested containers, dataclasses and plain objects (a cache of keys and values is one)."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or isinstance(value, (str, bytes, int, float, nn.Module, type)) or value is None:
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item, depth - 1)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_of(item, depth - 1)
    else:
        yield from tensors_of(getattr(value, "__dict__", None), depth - 1)
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                yield from tensors_of(getattr(value, name, None), depth - 1)


def not_traced(hook: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """The hook, which torch.compile calls instead of tracing when it compiles the module.

    torch._dynamo takes seconds to import, so it is asked only where somebody else has imported it or compiled.
    """
    if "torch._dynamo" in sys.modules or module._compiled_call_impl is not None:
        return torch._disable_dynamo(hook)
    disabled: list[Callable[..., Any]] = []

    def called(*args: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return hook(*args)
        if not disabled:
            disabled.append(torch._disable_dynamo(hook))
        return disabled[0](*args)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]
    return called

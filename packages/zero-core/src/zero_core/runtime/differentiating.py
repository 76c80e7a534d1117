"""Runs torch.autograd.grad and backward with respect to sharded parameters, whose gradients may arrive in parts.

Not here: a parameter's places in a graph, and joining the gradients of these (in parameter.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["backward", "grad"]

_Inputs = Callable[[Any], tuple[list[Any], Callable[[Sequence[Tensor | None]], Tensor | None]]]


def grad(of: _Inputs, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs torch.autograd.grad. of: returns an input's places in graphs, and a function that joins their gradients."""
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    replaced = [of(each) for each in given]
    parts = [part for found, _ in replaced for part in found]
    zeros = kwargs.pop("materialize_grads", False)
    unused = kwargs.get("allow_unused", False)
    if zeros or len(parts) > len(given):
        kwargs["allow_unused"] = True
    rest = iter(torch.autograd.grad(outputs, parts, *args, **kwargs))
    gradients = tuple(join([next(rest) for _ in found]) for found, join in replaced)
    if zeros:
        pairs = zip(given, gradients, strict=True)
        return tuple(torch.zeros(p.shape, dtype=p.dtype, device=p.device) if g is None else g for p, g in pairs)
    if kwargs.get("allow_unused", False) != unused and any(gradient is None for gradient in gradients):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph, and allow_unused is False"
        )
    return gradients


def backward(of: _Inputs, tensors: Any, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
    """Runs torch.autograd.backward. of: as in `grad`."""
    given = [inputs] if isinstance(inputs, Tensor) else inputs
    places = given and [part for each in given for part in of(each)[0]]
    torch.autograd.backward(tensors, *args, inputs=places, **kwargs)  # type: ignore[misc]

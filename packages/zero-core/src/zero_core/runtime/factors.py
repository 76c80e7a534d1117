"""Keeps the pending factors of held gradients, as of torch's clipping by `p.grad.mul_(c)`, until a step applies them.

Code that reads, overwrites or adds to a gradient asks for them first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Factors"]

Key = tuple[int, int]  # a unit's index, and the number of a parameter in it


class Factors:
    """For each parameter, the factors since its gradient was last written, in order."""

    def __init__(self) -> None:
        self._of: dict[Key, tuple[float, ...]] = {}
        self._read: tuple[Tensor, int, float] | None = None  # the tensor that was given last, its version, its number

    def __bool__(self) -> bool:
        return bool(self._of)

    def multiply(self, key: Key, factor: Tensor | float) -> None:
        """Adds a factor: a number, or a tensor of one element. The host reads a tensor once for all gradients that it
        multiplies."""
        if isinstance(factor, Tensor):
            if self._read is None or self._read[0] is not factor or self._read[1] != factor._version:
                self._read = factor, factor._version, float(factor.detach())
            factor = self._read[2]
        self._of[key] = (*self._of.get(key, ()), factor)

    def keys(self) -> list[Key]:
        return list(self._of)

    def apply(self, key: Key, values: Tensor) -> Tensor:
        """Multiplies `values`, of the parameter's gradient, in place, and returns them."""
        for factor in self._of.get(key, ()):
            values.mul_(factor)
        return values

    def forget(self, key: Key | None = None) -> None:
        """Drops the factors of one parameter. key: None means all."""
        if key is None:
            self._of.clear()
            self._read = None
        else:
            self._of.pop(key, None)

    def common(self, keys: Iterable[Key]) -> float | None:
        """Returns the factor that all of these have in common; None if they differ."""
        if not self._of:
            return 1.0
        found = {self._of.get(key, ()) for key in keys}
        return math.prod(found.pop(), start=1.0) if len(found) == 1 else 1.0 if not found else None

    def numbers(self) -> Tensor:
        """Returns (n,) float64, CPU: all different factors, for a comparison between ranks."""
        return torch.tensor(sorted({f for factors in self._of.values() for f in factors}), dtype=torch.float64)

"""What held gradients were multiplied by, as torch's clipping does with `p.grad.mul_(c)`, until a step does it.

Owns the pending factors. Whoever reads, overwrites or adds to a gradient asks for them first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Factors"]

Key = tuple[int, int]  # a unit's index, and the number of a parameter in it


class _Given:
    """A factor that the user gave as a tensor. The host waits for the device when it reads it first, and then knows."""

    def __init__(self, factor: Tensor) -> None:
        self.values = factor.detach().clone().reshape(())
        self._number: float | None = None

    def __float__(self) -> float:
        if self._number is None:
            self._number = float(self.values)
        return self._number


class Factors:
    """Of each parameter the factors since its gradient was last written, in order; fp32 numbers or the user's own."""

    def __init__(self) -> None:
        self._of: dict[Key, tuple[_Given | float, ...]] = {}
        self._copied: tuple[Tensor, int, _Given] | None = None  # one tensor multiplies all parameters, mostly

    def __bool__(self) -> bool:
        return bool(self._of)

    def multiply(self, key: Key, factor: Tensor | float) -> None:
        """factor: a number, or a tensor of one element, which the user may change afterwards."""
        given: _Given | float
        if isinstance(factor, Tensor):
            if self._copied is None or self._copied[0] is not factor or self._copied[1] != factor._version:
                self._copied = factor, factor._version, _Given(factor)
            given = self._copied[2]
        else:
            given = factor
        self._of[key] = (*self._of.get(key, ()), given)

    def keys(self) -> list[Key]:
        return list(self._of)

    def apply(self, key: Key, values: Tensor) -> Tensor:
        """Multiply `values`, of the parameter's gradient, in place, and return them."""
        for factor in self._of.get(key, ()):
            values.mul_(factor.values.to(values.device) if isinstance(factor, _Given) else factor)
        return values

    def forget(self, key: Key | None = None) -> None:
        """key: None means all."""
        if key is None:
            self._of.clear()
            self._copied = None
        else:
            self._of.pop(key, None)

    def common(self, keys: Iterable[Key]) -> float | None:
        """What all of these are multiplied by; None if it is not the same. Waits for the device."""
        if not self._of:
            return 1.0
        found = {tuple(float(factor) for factor in self._of.get(key, ())) for key in keys}
        return math.prod(found.pop(), start=1.0) if len(found) == 1 else 1.0 if not found else None

    def numbers(self) -> Tensor:
        """(n,) float64, CPU: all different ones, for a comparison between ranks. Waits for the device."""
        return torch.tensor(sorted({float(f) for factors in self._of.values() for f in factors}), dtype=torch.float64)

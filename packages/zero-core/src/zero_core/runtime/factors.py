"""What held gradients were multiplied by, as torch's clipping does with `p.grad.mul_(c)`, until a step does it.

Owns the pending factors. Whoever reads, overwrites or adds to a gradient asks for them first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Factors"]

Key = tuple[int, int]  # a unit's index, and the number of a parameter in it


class _Given:
    """A factor that the user gave as a tensor. The host waits for the device when it reads it first, and then knows."""

    def __init__(self, factor: Tensor) -> None:
        self._source, self._version = factor, factor._version
        self.values = factor.detach().clone().reshape(())

    def is_of(self, factor: Tensor) -> bool:
        """Whether it is this tensor, which was not written since."""
        return self._source is factor and self._version == factor._version

    @cached_property
    def _number(self) -> float:
        return float(self.values)

    def __float__(self) -> float:
        return self._number


class Factors:
    """Of each parameter the factors since its gradient was last written, in order; fp32 numbers or the user's own."""

    def __init__(self) -> None:
        self._of: dict[Key, tuple[_Given | float, ...]] = {}  # of that which was multiplied last at the end

    def __bool__(self) -> bool:
        return bool(self._of)

    def multiply(self, key: Key, factor: Tensor | float) -> None:
        """factor: a number, or a tensor of one element, which the user may change afterwards."""
        given: _Given | float
        if isinstance(factor, Tensor):
            last = next(reversed(self._of.values()), (None,))[-1]  # one tensor multiplies all parameters, mostly
            given = last if isinstance(last, _Given) and last.is_of(factor) else _Given(factor)
        else:
            given = factor
        self._of[key] = (*self._of.pop(key, ()), given)

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

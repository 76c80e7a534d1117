"""Leaves gradients of a backward inside of a unit's forward in p.grad until the forward is over, as torch has them.

Owns which parameters have one. Not here: when a forward is over (in hooks.py).
"""

from __future__ import annotations

from collections.abc import Container

from ..errors import GradientError
from .gradient import Leftover
from .reducer import Reducer
from .unit import Unit

__all__ = ["NestedGradients"]


class NestedGradients:
    """Those of one sharded model. refused: the sharded model's options allow none."""

    def __init__(self, reducer: Reducer, *, refused: bool) -> None:
        self._reducer, self._refused = reducer, refused
        self.waiting: set[tuple[Unit, int]] = set()  # whose p.grad a forward under way has, and may step and clear

    def arrived(self, unit: Unit, k: int) -> None:
        """A gradient arrived inside of the unit's forward. Raises GradientError where p.grad would be only a part of
        it."""
        if self._refused or unit.gradient.waits(k) or unit.gradient.leftover[k] is Leftover.STEPPED:
            unit.gradient.collect(k)
            raise GradientError(
                f"a backward() inside of the forward of unit {unit.name!r} gave {unit.layout.slots[k].name} a "
                "gradient. In p.grad there, torch has the sum since zero_grad(), and the shards have a part of it, or "
                "update_in_backward or loss_scale= is used. Call zero_grad() before this forward, or backward() after "
                "it, or take the gradients inside of it with torch.autograd.grad(), and set p.grad for an optimizer "
                "there"
            )
        self.waiting.add((unit, k))

    def collect(self, units: Container[int], *, reduce: bool) -> None:
        """The forward of these units is over: moves their gradients from p.grad to the shards."""
        for unit, k in [each for each in self.waiting if each[0].index in units]:
            self.waiting.remove((unit, k))
            unit.gradient.collect(k)
            if reduce:
                self._reducer.reduce_unit_late(unit)

    def lose(self) -> None:
        """After Ctrl-C: the step refuses to go without them."""
        for unit, _ in self.waiting:
            unit.gradient.lost = True
        self.waiting.clear()

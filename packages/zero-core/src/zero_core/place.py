"""Where one parameter lives: the answers that `parameter.Sharded` asks for, given by a unit and its engine."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .hooks import Engine
from .unit import Unit

__all__ = ["Place"]


class Place:
    """A `parameter.Home`: parameter `index` of `unit`."""

    def __init__(self, engine: Engine, unit: Unit, index: int) -> None:
        self.engine, self.unit, self.index = engine, unit, index

    @property
    def name(self) -> str:
        return self.unit.layout.slots[self.index].name

    def full_copy(self, parameter: Tensor) -> Tensor:
        return self.engine.full_copy(self.unit, self.index)

    def write_back(self, parameter: Tensor, values: Tensor) -> None:
        self.engine.write(self.unit, self.index, values)

    def epoch(self, parameter: Tensor) -> int:
        return self.unit.epoch

    def note_external_use(self, parameter: Tensor) -> Callable[[Tensor], Tensor]:
        return self.engine.note_external_use(self.unit)

    def holds_gradient(self, parameter: Tensor) -> bool:
        return self.unit.holds_gradient(self.index)

    def drop_gradient(self, parameter: Tensor) -> None:
        self.engine.drop_gradient(self.unit, self.index)

"""Where one parameter lives: the answers that `parameter.Sharded` asks for, given by a unit and its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..building.parts import named_parts
from .hooks import Engine
from .unit import Unit

__all__ = ["Place", "places_of"]


class Place:
    """A `parameter.Home`: parameter `index` of `unit`."""

    def __init__(self, engine: Engine, unit: Unit, index: int) -> None:
        self.engine, self.unit, self.index = engine, unit, index

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the parameter's tensor, made while it has memory, is not sharded."""

    @property
    def name(self) -> str:
        return self.unit.layout.slots[self.index].name

    def full_copy(self, parameter: Tensor) -> Tensor:
        return self.engine.full_copy(self.unit, self.index)

    def write_back(self, parameter: Tensor, values: Tensor) -> None:
        self.engine.write(self.unit, self.index, values)

    def take_values(self, parameter: Tensor, values: Tensor) -> None:
        self.engine.write(self.unit, self.index, values)
        self.engine.writes.given(self.name, values, trained=self.unit.trainable)

    def epoch(self, parameter: Tensor) -> int:
        return self.unit.epochs[self.index]

    def note_external_use(self, parameter: Tensor) -> Callable[[Tensor], Tensor]:
        return self.engine.note_external_use(self.unit)

    def holds_gradient(self, parameter: Tensor) -> bool:
        return self.unit.gradient.holds(self.index)

    def drop_gradient(self, parameter: Tensor) -> None:
        self.engine.drop_gradient(self.unit, self.index)

    def instead_of(self, operation: str) -> str:
        if "unscale" in operation:  # torch.amp.GradScaler
            if self.engine.loss_scale is not None:
                return "The loss is scaled already, by loss_scale= of zero_core.shard: leave the GradScaler out"
            return 'Pass loss_scale="dynamic" to zero_core.shard, and leave the GradScaler out'
        norm = self.engine.max_grad_norm
        if operation.rpartition(".")[2].endswith("zero_"):
            return "Call optimizer.zero_grad(), which forgets it"
        if not any(word in operation for word in ("norm", "clamp", "mul")):
            return (
                "zero_core.full_gradient(parameter) returns it, and zero_core.set_full_gradient(parameter, values) "
                "changes it, both on every rank; inside backward parameter.register_hook sees this rank's part, and "
                "after step() the norm is optimizer.grad_norm"
            )
        after = (
            "optimizer.grad_norm is the norm before clipping, once step() has returned. For other edits there are "
            "zero_core.full_gradient(parameter) and zero_core.set_full_gradient(parameter, values)"
        )
        if norm is not None:
            return (
                f"Remove the call: optimizer.step() clips to max_grad_norm={norm} as zero_core.shard was told; {after}"
            )
        return (
            f"To clip, pass max_grad_norm= to zero_core.shard, which clips inside step(), and remove the call; {after}"
        )


def places_of(module: nn.Module) -> list[Place]:
    """Where the parameters of a module are, part by part; those that are not sharded are left out."""
    found = [part.tensor.__dict__.get("_zero_home") for part in named_parts(module)]
    return [place for place in found if place is not None]

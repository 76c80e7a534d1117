"""Gives one sharded parameter its values and its gradient, from its unit and the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ChangedParameterError, GradientError, ShardedParameterError, ZeroError
from ..gradients.gradient_access import USED_UP
from ..tensors.inner_tensors import named_parts
from ..tensors.parameter_home import Home
from ..tensors.version_counters import Version
from ..unit_memory.unit import Unit
from ..unit_memory.unit_gradient import Leftover
from .engine import Engine


class Place(Home):
    """A `parameter_home.Home`: parameter `index` of `unit`."""

    def __init__(self, engine: Engine, unit: Unit, index: int) -> None:
        self.engine, self.unit, self.index = engine, unit, index

    @property
    def name(self) -> str:
        return self.unit.layout.slots[self.index].name

    def is_of(self, parameter: Tensor) -> bool:
        """Whether this is the parameter itself, and no tensor over its memory, which has no gradient."""
        return parameter is self.unit.parameters[self.index]

    def full_copy(self, parameter: Tensor) -> Tensor:
        return self.engine.copies.full(self.unit, self.index)

    def write_back(self, parameter: Tensor, values: Tensor, uncounted: Tensor | None) -> None:
        self.engine.copies.write(self.unit, self.index, values, uncounted)

    def overwrite(self, parameter: Tensor, values: Tensor) -> bool:
        self.engine.ranks.meet(f"copy_() into {self.name}")
        self.engine.copies.write(self.unit, self.index, values, parameter)
        return True

    def take_values(self, parameter: Tensor, values: Tensor) -> None:
        if not self.is_of(parameter):
            raise ChangedParameterError(
                f"tensor.data = values for a tensor that shares the memory of {self.name}: in torch they would not "
                "share memory any more. Assign the values to the attribute that holds the tensor"
            )
        self.engine.copies.write(self.unit, self.index, values, None)  # torch counts no p.data = values
        self.engine.writes.given(self.name, values, trained=self.unit.trainable)

    def versions(self, parameter: Tensor) -> list[Version]:
        return [self.unit.versions[self.index]]

    def note_external_use(self, parameter: Tensor) -> Callable[[Tensor], Tensor]:
        return self.engine.note_external_use(self.unit)

    def held_gradient(self, parameter: Tensor) -> Place | None:
        return self if self.is_of(parameter) and self.unit.gradient.holds(self.index) else None

    def drop_gradient(self, parameter: Tensor) -> None:
        if self.is_of(parameter):
            self.engine.drop_gradient(self.unit, self.index)

    # -- as `stacked_parameter.Stacked`, of a parameter in one piece ---------------------------------------------------

    @property
    def places(self) -> list[Place]:
        """Of the parameter's rows, if it is cut into these; else this one."""
        return [self]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unit.layout.slots[self.index].shape

    def cut(self, whole: Tensor) -> Iterator[tuple[Place, Tensor, Any]]:
        yield self, whole, self.unit.parameters[self.index]

    def join(self, values: Callable[[Place], Tensor | None]) -> Tensor | None:
        return values(self)

    # -- for `grad_proxy.HeldGradient` ---------------------------------------------------------------------------------

    @property
    def gradient_version(self) -> Version:
        """The version that changes with this gradient. It ends at each step or zero_grad()."""
        return self.unit.gradient.versions[self.index]

    def multiply_gradient(self, factor: Tensor | float) -> None:
        """Multiply it by a number, or by a tensor of one element, before the step at the latest."""
        self.engine.gradients.factors.multiply((self.unit.index, self.index), factor)
        self.gradient_version.wrote()

    def gradient(self) -> Tensor:
        """A copy, fp32, of the parameter's shape."""
        values = self.engine.gradients.read(self.unit, self.index)
        if values is None:  # of several ranks none has one, which was not known when `p.grad` was asked for
            return torch.zeros(self.unit.layout.slots[self.index].shape, device=self.engine.ranks.device)
        return values

    def overwrite_gradient(self, values: Tensor) -> None:
        """Let `values`, of the parameter's shape, be the gradient."""
        flat = values.to(self.engine.ranks.device, torch.float32).reshape(-1)
        if not self.engine.gradients.write(self.unit, self.index, flat):
            raise GradientError(f"{self.name} has no gradient to overwrite, on any rank: p.grad is None in plain torch")

    @staticmethod
    def power_sum(places: Sequence[Place], order: float) -> float:
        """The sum of |g| ** order over the gradients of `places`; of order inf their largest |g|."""
        keys: dict[Engine, list[tuple[int, int]]] = {}
        for place in places:
            keys.setdefault(place.engine, []).append((place.unit.index, place.index))
        sums = [engine.gradients.power_sum(found, order) for engine, found in keys.items()]
        return max(sums) if order == math.inf and not any(map(math.isnan, sums)) else sum(sums)

    def refuse(self, operation: str) -> str | None:
        """Why `operation` is refused for this gradient, and the call to use instead. None: it is not."""
        engine = self.engine
        if "unscale" in operation:  # torch.amp.GradScaler
            if engine.loss_scale is not None:
                return "the loss is scaled already, by loss_scale= of zero_core.shard: leave the GradScaler out"
            return 'pass loss_scale="dynamic" to zero_core.shard, and leave the GradScaler out'
        if operation.rpartition(".")[2].endswith("zero_"):
            return "call optimizer.zero_grad(), which forgets it"
        if engine.reducer.updates:
            return f"it {USED_UP}"
        if self.unit.gradient.leftover[self.index] is Leftover.STEPPED:
            return "step() has used it up; call optimizer.zero_grad() after each step()"
        return engine.refusal()


class Left(Place):
    """A `parameter_home.Home` of a tensor that was not in the model any more when it was sharded again: it has no
    values.
    """

    def full_copy(self, parameter: Tensor) -> Tensor:
        kind = type(self.engine.model).__name__
        raise ShardedParameterError(
            f"{self.name} has no values any more: it was not in the {kind} when zero_core.shard was called again. Copy "
            "what you need of a module before you remove it, p.detach().clone(), or call zero_core.unshard before"
        )

    def overwrite(self, parameter: Tensor, values: Tensor) -> bool:
        return False

    def take_values(self, parameter: Tensor, values: Tensor) -> None:
        self.full_copy(parameter)

    def held_gradient(self, parameter: Tensor) -> None:
        return None

    def drop_gradient(self, parameter: Tensor) -> None:
        """No-op: it has no gradient."""


def places_of(module: nn.Module) -> list[Place]:
    """Where the parameters of a module are, part by part or row by row; those that are not sharded are left out."""
    found = [part.tensor.__dict__.get("_zero_home") for part in named_parts(module)]
    return [place for home in found if home is not None for place in home.places]


def sharded_places(module: nn.Module) -> list[Place]:
    """As `places_of`. Raises ZeroError if there are none."""
    places = places_of(module)
    if not places:
        raise ZeroError(f"{type(module).__name__} has no sharded parameter: call zero_core.shard first")
    return places

"""Shards a parameter whose memory is in its parts: [Note: the parts of a parameter]. Knows neither units nor stores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import ChangedParameterError
from .inner_tensors import forget_parts
from .parameter_home import Home, home_of, set_home
from .sharded_parameter import sharded_class
from .version_counters import Version


class Composite(Home):
    """A parameter whose memory is in its parts, which may be in several units: it is usable while all of them are.

    It is its own `Home`. It was frozen when the model was sharded.
    """

    def __init__(self, name: str, parameter: Any) -> None:
        self.name, self.parameter = name, parameter
        self.kind: Any = type(parameter)
        names, self._context = parameter.__tensor_flatten__()
        self.parts: dict[str, Any] = {each: getattr(parameter, each) for each in names}
        self._closed: set[int] = set()  # indices of units

    def close(self, unit: int) -> None:
        """Makes the parameter unusable, before the unit's memory goes."""
        self._closed.add(unit)
        self.parameter.__class__ = sharded_class(self.kind)

    def open(self, unit: int) -> None:
        """Makes the parameter usable, if all of its units have memory now."""
        found = self.parameter.__dict__
        replaced = any(found.get(name) is not part for name, part in self.parts.items())
        if replaced or type(self.parameter) is not sharded_class(self.kind):
            raise ChangedParameterError(
                f"{self.name} has been replaced since zero_core.shard, for example by model.to(dtype): move, cast and "
                "quantise the model before zero_core.shard"
            )
        self._closed.discard(unit)
        if not self._closed:
            self.parameter.__class__ = self.kind

    def give_back(self, *, plain: bool = True) -> None:
        """Gives the parts back to the user. plain: False where they belong to earlier shards."""
        self.parameter.__class__ = self.kind
        if plain:
            set_home(self.parameter, None)
            forget_parts(self.parameter)

    def full_copy(self, parameter: Tensor) -> Tensor:
        inner = {name: home_of(part).full_copy(part) for name, part in self.parts.items()}
        with torch._C.DisableTorchFunctionSubclass():
            size, stride = parameter.size(), parameter.stride()
        return self.kind.__tensor_unflatten__(inner, self._context, size, stride)

    def write_back(self, parameter: Tensor, values: Tensor, uncounted: Tensor | None) -> None:
        for name, part in self.parts.items():
            home_of(part).write_back(part, getattr(values, name), uncounted)

    def take_values(self, parameter: Tensor, values: Tensor) -> None:
        raise AssertionError("p.data = tensor is refused before")

    def versions(self, parameter: Tensor) -> list[Version]:
        return [version for part in self.parts.values() for version in home_of(part).versions(part)]

"""A sharded model as checkpoints and pretrained files see it: named slices of parameters, in a store.

Owns the translation from a parameter's elements to a unit's shard. Moves values tile by tile; knows no file format.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["ShardSlice", "ShardView", "view_of"]


@dataclass(frozen=True)
class ShardSlice:
    """Elements [start, stop) of the row-major parameter `name`, which lie at `shard_start` of unit `unit`'s shard."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    unit: int
    shard_start: int


class ShardView(Protocol):
    """This rank's slices of a sharded model."""

    is_first: bool  # of all ranks: creates files and names them
    writes: bool  # this rank's slices are written by it, not by a replica

    def slices(self) -> Iterator[ShardSlice]: ...

    def read(self, part: ShardSlice, state: str, start: int, stop: int) -> Tensor: ...

    def write(self, part: ShardSlice, state: str, start: int, values: Tensor) -> None: ...

    def parameter_values(self, part: ShardSlice, start: int, stop: int) -> Tensor: ...

    def refresh(self) -> None: ...

    def barrier(self) -> None: ...


def view_of(model: nn.Module) -> ShardView | None:
    """The view of a model that `shard` has changed; None for any other."""
    sharding: Any = sys.modules.get("zero_core.shard")  # no model is sharded before this was imported
    return None if sharding is None else sharding.view_of(model)

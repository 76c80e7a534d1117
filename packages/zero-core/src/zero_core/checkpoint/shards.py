"""A sharded model as checkpoints and pretrained files see it: named slices of parameters, in a store.

Owns the translation from a parameter's elements to a unit's shard. Moves values as it is told; knows no file format.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..precision import round_to
from ..store import ScalarStates

if TYPE_CHECKING:
    from ..sharding import Handle

__all__ = ["MASTER", "ShardSlice", "ShardView", "clean_name", "view_of"]

MASTER = "master"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class ShardSlice:
    """Elements [start, stop) of the row-major parameter `name`, which lie at `shard_start` of unit `unit`'s shard."""

    name: str  # as in model.named_parameters()
    shape: tuple[int, ...]
    start: int
    stop: int
    unit: int
    index: int  # of the parameter in its unit
    segment: int  # of the shard
    shard_start: int


class ShardView:
    """This rank's slices of a sharded model. Making one settles the model: nothing of it is whole afterwards.

    is_first: rank 0. writes: this rank's slices are written to files by it and not by a replica.
    """

    def __init__(self, handle: Handle) -> None:
        handle.settle()
        self.handle = handle
        self.ranks = handle.ranks
        self.store = handle.store
        self.is_first = self.ranks.rank == 0
        self.writes = self.ranks.replicate.rank == 0

    def slices(self) -> Iterator[ShardSlice]:
        """This rank's, in the store's order. Frozen parameters too; they have a master and no other state."""
        for unit in self.handle.units:
            pieces = unit.layout.pieces(self.ranks.shard.rank)
            for segment, (piece, k) in enumerate(zip(pieces, unit.segment_slots(), strict=True)):
                where = unit.index, k, segment, piece.shard_start
                yield ShardSlice(piece.slot.name, piece.slot.shape, piece.slot_start, piece.slot_stop, *where)

    def read(self, part: ShardSlice, state: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the parameter's `state`: (stop - start,) on the CPU, memory of its own."""
        at = part.shard_start - part.start
        values = self.store.read_state(part.unit, state, at + start, at + stop).cpu()
        if values.untyped_storage().nbytes() != values.numel() * values.element_size():
            values = values.clone()  # a view of the store's own memory: saving it would save all of that
        return values

    def overwriting(self, names: Container[str] | None = None) -> None:
        """Tells autograd that the parameters in `names`, or all, are about to change. To be called on every rank."""
        for unit in self.handle.units:
            for k, slot in enumerate(unit.layout.slots):
                if names is None or slot.name in names:
                    unit.overwritten(k)

    def write(self, part: ShardSlice, state: str, start: int, values: Tensor) -> None:
        """Overwrite elements [start, start + len(values)) of the parameter's `state`. See `overwriting`."""
        dtype = self.dtype_of(part, state)
        if values.dtype != dtype:
            round_to(values, found := torch.empty(values.shape, dtype=dtype))
            values = found
        self.store.write_state(part.unit, state, part.shard_start - part.start + start, values)

    def dtype_of(self, part: ShardSlice, state: str) -> torch.dtype:
        """Of a state: fp32, but for the master of what is not trained."""
        return self.handle.units[part.unit].master_dtype if state == MASTER else torch.float32

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Numbers that the optimizer keeps of a parameter besides its step count."""
        return self.store.scalar_names() if isinstance(self.store, ScalarStates) else ()

    def read_scalar(self, part: ShardSlice, name: str) -> float | None:
        """None where the parameter has taken no step."""
        assert isinstance(self.store, ScalarStates)
        return self.store.read_scalar(part.unit, part.segment, name)

    def write_scalar(self, part: ShardSlice, name: str, value: float) -> None:
        assert isinstance(self.store, ScalarStates)
        self.store.write_scalar(part.unit, part.segment, name, value)

    def parameter_values(self, part: ShardSlice, start: int, stop: int) -> Tensor:
        """As `read`, of the parameter itself, in its dtype: the master rounded as the store rounds it."""
        master = self.read(part, MASTER, start, stop)
        dtype = self.handle.units[part.unit].dtype
        if dtype == master.dtype:
            return master
        rounded = torch.empty(stop - start, dtype=dtype)
        round_to(master, rounded)
        return rounded


def view_of(model: nn.Module) -> ShardView | None:
    """The view of a model that `shard` has changed; None for any other."""
    handle: Any = model.__dict__.get("_zero_handle")  # sharding.py is above this module
    return None if handle is None else ShardView(handle)


def clean_name(name: str) -> str:
    """A parameter's name without the prefixes of torch.compile and of activation checkpointing wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name

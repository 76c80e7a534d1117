"""Shows a sharded model to checkpoints and pretrained files as named slices of parameters.

Owns the translation from a parameter's elements to a unit's shard. Does not know file formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ZeroError
from ..model.parameter_names import Named, named_tensors
from ..precision import rounded
from ..tensors.inner_tensors import named_parts

MASTER = "master"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class ShardSlice:
    """Elements [start, stop) of the row-major parameter `name`, which begin at `shard_start` of unit `unit`'s shard."""

    name: str  # as in model.named_parameters() now
    shape: tuple[int, ...]
    start: int
    stop: int
    unit: int
    index: int  # of the parameter in its unit
    segment: int  # of the shard
    shard_start: int

    def of(self, shape: tuple[int, ...]) -> ShardSlice:
        """Returns the slice that covers a whole state of this shape."""
        return replace(self, shape=shape, start=0, stop=math.prod(shape))


@dataclass(frozen=True)
class ShardView:
    """This rank's slices of a sharded model, or of a part of one. handle: the model's `shard.Handle`.

    names: the module's current parameters and persistent buffers. Names may have changed since `shard`, as by PEFT's
    merge_and_unload and delete_adapter. store: the model's, or values that were pinned in it, for another thread that
    only reads. keeps_values: `write` changes no parameter, and takes only master elements that round to the parameter.
    """

    handle: Any
    names: tuple[Named, ...]
    store: Any
    keeps_values: bool = False

    @cached_property
    def _called(self) -> dict[tuple[int, int], str | None]:
        called = {id(named.tensor): named.name for named in self.names}
        return {(u.index, k): called.get(id(p)) for u in self.handle.units for k, p in enumerate(u.wholes)}

    @cached_property
    def _sharded(self) -> set[int]:
        return {id(p) for unit in self.handle.units for p in unit.wholes}

    @property
    def ranks(self) -> Any:
        return self.handle.ranks

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return bool(self.ranks.rank == 0)

    def parameters(self) -> Iterator[tuple[Any, int, str]]:
        """Yields (unit, index in it, name) of each sharded parameter that the module still has. A parameter that is cut
        into rows has an entry for each of its parts."""
        for unit in self.handle.units:
            for k in range(len(unit.parameters)):
                if (name := self._called[unit.index, k]) is not None:
                    yield unit, k, name

    def is_whole(self, named: Named) -> bool:
        """Whether every rank has all of it: buffers, and parameters that came into the model after `shard`."""
        return named.is_buffer or id(named.tensor) not in self._sharded

    def slices(self) -> Iterator[ShardSlice]:
        """Yields this rank's slices, in the store's order. Frozen parameters have a master and no other state."""
        for unit in self.handle.units:
            for segment, piece in enumerate(unit.pieces):
                if (name := self._called[unit.index, piece.k]) is not None:
                    where, whole = (unit.index, piece.k, segment, piece.shard_start), piece.slot.whole
                    first, last = (whole.flat_start + at for at in (piece.slot_start, piece.slot_stop))
                    yield ShardSlice(name, whole.shape, first, last, *where)

    def read(self, part: ShardSlice, state: str, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) of the parameter's `state`: (stop - start,) on the CPU, memory of its own."""
        if state in self.shaped(part):
            values = self.store.read_shaped(part.unit, part.segment, state, start, stop).cpu()
        else:
            at = part.shard_start - part.start
            values = self.store.read_state(part.unit, state, at + start, at + stop).cpu()
        if values.untyped_storage().nbytes() != values.numel() * values.element_size():
            values = values.clone()  # a view of the store's own memory: saving it would save all of that
        return values

    def overwriting(self, names: Container[str], *, as_built: bool = False) -> None:
        """Tells autograd that the parameters in `names` are about to change. Call it on every rank.

        as_built: a newly built model has the same values, so `left_out` may leave these parameters out.
        """
        for unit, k, name in self.parameters():
            if name in names:
                unit.overwritten(k)
                if as_built:
                    unit.versions[k].ends = 0

    def left_out(self, also: Callable[[str], bool]) -> dict[str, tuple[int, ...]]:
        """Returns names and shapes of the parameters that a checkpoint with trained_only=True leaves out. Collective.

        They are frozen, no rank has written into them since the model was built, and `also` is False for all of their
        names.
        """
        kept = {named.name for named in self.names if any(map(also, named.names))}
        frozen = [(unit, k, name) for unit, k, name in self.parameters() if not unit.trainable and name not in kept]
        written = self.ranks.anywhere([unit.versions[k].ends > 0 for unit, k, _ in frozen], "checkpoint.save")
        changed = {name for (_, _, name), flag in zip(frozen, written, strict=True) if flag}
        return {clean_name(n): unit.layout.slots[k].whole.shape for unit, k, n in frozen if n not in changed}

    def write(self, part: ShardSlice, state: str, start: int, values: Tensor) -> None:
        """Overwrites elements [start, start + len(values)) of the parameter's `state`. See `overwriting`."""
        values = rounded(values, self.dtype_of(part, state))
        if state == MASTER and self.keeps_values:
            own, dtype = self.read(part, MASTER, start, start + len(values)), self.handle.units[part.unit].dtype
            values = torch.where(rounded(values, dtype) == rounded(own, dtype), values, own)
        if state in self.shaped(part):
            self.store.write_shaped(part.unit, part.segment, state, start, values)
            return
        self.store.write_state(part.unit, state, part.shard_start - part.start + start, values)

    def dtype_of(self, part: ShardSlice, state: str) -> torch.dtype:
        """Returns the dtype of a state: fp32, except for the master of a frozen parameter."""
        return self.handle.units[part.unit].master_dtype if state == MASTER else torch.float32

    def shaped(self, part: ShardSlice) -> Mapping[str, tuple[int, ...]]:
        """Returns names and shapes of the parameter's states that have another shape than the parameter."""
        return self.handle.units[part.unit].shaped(part.index)

    def parameter_values(self, part: ShardSlice, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) of the parameter itself, in its dtype: the master, rounded as by the store."""
        return rounded(self.read(part, MASTER, start, stop), self.handle.units[part.unit].dtype)


def view_of(model: nn.Module) -> ShardView | None:
    """Returns the view of a module with sharded parameters, after all units were resharded; None for any other.

    Raises ZeroError for a module with parameters of several sharded models.
    """
    found = [part.tensor.__dict__.get("_zero_home") for part in named_parts(model)]
    homes = [home for home in found if home is not None]
    handles = {id(home.engine): home.engine.model.__dict__["_zero_handle"] for home in homes}
    if len(handles) > 1:
        raise ZeroError(f"the model has parameters of {len(handles)} sharded models: save and load each of these alone")
    handle: Any = model.__dict__.get("_zero_handle") or next(iter(handles.values()), None)
    if handle is None:
        return None
    handle.settle()
    return ShardView(handle, named_tensors(model), handle.store)


def extra_states(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the modules that have an extra state (torch's get_extra_state), with its name in state_dict()."""
    for path, module in model.named_modules(remove_duplicate=False):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{path}._extra_state" if path else "_extra_state", module


def clean_name(name: str) -> str:
    """Returns a parameter's name without the prefixes of torch.compile and activation checkpointing wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name

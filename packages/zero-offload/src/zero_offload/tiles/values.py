"""A shard's values from outside: its first ones, and those that checkpoints read and write by name.

Owns the way of one tile after another through memory. Runs while no update does; what waits for that is `store`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zero_core.precision import round_to

from ..protocols import UpdateStep
from .footprint import StorePlan
from .parameters import ParameterStore
from .states import StateStore
from .tile import Tile, View

__all__ = ["Values"]


class Values:
    """Logical values of every shard: "master" and the step's states, wherever and in whatever layout they are.

    They are fp32. The master of a shard that is not trained is the shard itself, in its own dtype.
    """

    def __init__(self, plan: StorePlan, parameters: ParameterStore, states: StateStore, step: UpdateStep) -> None:
        self._plan, self._parameters, self._states, self._step = plan, parameters, states, step

    def first(self, i: int, master: Tensor, *, kept: bool = False) -> None:
        """Lay out shard i from its master (shard_numel,), unless it is whole on a device; nothing is read.

        kept: an earlier process left the values of what is trained, and they stay what they are.
        """
        unit = self._plan.units[i]
        if master.numel() != unit.spec.numel:
            raise ValueError(f"initial({i}) has {master.numel()} elements, {unit.spec.name} has {unit.spec.numel}")
        if unit.whole:  # it is the device tier's
            return
        master = master.detach().to("cpu", unit.spec.master_dtype)
        for tile in unit.tiles:
            if kept and tile.trainable:
                continue
            values = master[tile.start : tile.stop]
            with self._opened(tile, change=True, read=kept) as view:
                if tile.trainable:
                    self._step.initialise(view, values)
                else:
                    round_to(values, view.parameter)
                self._parameters.changed(tile)

    def at_hand(self) -> set[int]:
        """After a transfer failed: the units whose bytes are in slots, whatever became of their writes."""
        self._states.slots.forget_leaving()
        return self._parameters.forget_writes()

    def read(self, i: int, name: str, start: int, stop: int) -> Tensor:
        """(stop - start,), a copy."""
        dtype = self._plan.units[i].spec.master_dtype if name == "master" else torch.float32
        values = torch.empty(stop - start, dtype=dtype)
        for tile in self._tiles(i, start, stop):
            low, high = max(start, tile.start), min(stop, tile.stop)
            needs_states = tile.trainable and not (name == "master" and self._is_master(tile))
            with self._opened(tile, change=False, states=needs_states) as view:
                if needs_states:
                    found = self._step.read(view, name)
                else:
                    found = view.parameter if name == "master" else torch.zeros(tile.numel)
                values[low - start : high - start] = found[low - tile.start : high - tile.start]
        return values

    def write(self, i: int, name: str, start: int, values: Tensor) -> None:
        """Overwrite elements [start, start + len(values)); the parameter follows its master."""
        stop = start + values.numel()
        dtype = self._plan.units[i].spec.master_dtype if name == "master" else torch.float32
        values = values.detach().to("cpu", dtype).reshape(-1)
        for tile in self._tiles(i, start, stop):
            low, high = max(start, tile.start), min(stop, tile.stop)
            part = values[low - start : high - start]
            with self._opened(tile, change=True) as view:
                if tile.trainable:
                    whole = part
                    if part.numel() != tile.numel:
                        whole = self._step.read(view, name)
                        whole[low - tile.start : high - tile.start] = part
                    self._step.write(view, name, whole)
                elif name == "master":
                    round_to(part, view.parameter[low - tile.start : high - tile.start])
                if name == "master":
                    self._parameters.changed(tile)

    def _is_master(self, tile: Tile) -> bool:
        """Whether the parameter is the master itself."""
        unit = self._plan.units[tile.unit]
        record = unit.records[tile.index]
        return unit.spec.dtype is torch.float32 and all(f.name != "master" for f in (record.fields if record else ()))

    def _tiles(self, i: int, start: int, stop: int) -> Iterator[Tile]:
        tiles = self._plan.units[i].tiles if start < stop else ()
        return (tile for tile in tiles if tile.start < stop and tile.stop > start)

    @contextmanager
    def _opened(self, tile: Tile, *, change: bool, states: bool = True, read: bool = True) -> Iterator[View]:
        """The tile in memory, with its `states` or without. They are written back where they `change`; else they stay
        as if read ahead. `read=False`: everything will be written, so that nothing need be read.
        """
        self._parameters.begin_update(tile.unit, wait=True, read=read, steal=True)
        slot = None
        try:
            if states and self._states.stored(tile):
                slot = self._states.begin_read(tile, wait=True) if read else self._states.slots.take(tile)
                assert slot is not None
                slot.wait_changeable()
            views = self._states.views(tile, slot) if tile.trainable else {}
            parameter = self._parameters.for_update(tile, read=read)
            yield View(views, parameter, parameter[:0])
            if states and change:
                self._states.changed(tile, slot)
                slot = None
        finally:
            if slot is not None and change:  # it ended early: where they are stored they are what they were
                self._states.slots.give(slot)
            elif slot is not None:
                self._states.keep(slot)
            self._parameters.end_update(tile.unit, wanted=False)

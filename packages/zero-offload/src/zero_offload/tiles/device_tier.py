"""Keeps the parameters of units on a discrete device whose states are on a slower tier.

Not here: units whose states are on the device too (in store/paths.py).

[Note: homes and mirrors]
The home of a unit is its parameters on the device. A tile's mirror is a slot of host memory in which the update thread
changes it. Only copies of the swap_in lane write a home, and the copies from it into a unit's memory, for forward and
backward, are in the same lane, so these happen one after another. An update that writes the whole tile needs no old
values. If it leaves elements out, or reads the parameter because that is the master or a part of it, the home is first
copied into the mirror, in the swap_out lane. That copy follows the last one into the home, and the update waits for it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..durable.ab_places import TwoPlaces, parameters_of
from ..layout.tile import Tile, round_up
from ..memory.arena import Block
from ..memory.slots import Slot, Slots
from ..streams import Streams
from .store_context import Shared


class Homes(dict[int, Tensor]):
    """Units whose parameters alone are on a discrete device: maps each to these, (shard_numel,)."""

    def __init__(self, shared: Shared, streams: Streams) -> None:
        plan = self._plan = shared.plan
        super().__init__((i, streams.empty(u.spec.numel, u.spec.dtype)) for i, u in enumerate(plan.units) if u.home)
        self._streams, self._in_flight = streams, shared.in_flight
        self.allocated()
        self._kept: dict[Tile, TwoPlaces] = {}  # the places to which each update writes tiles that are durable
        if shared.generations is not None:
            for tile in (tile for i in self for tile in plan.units[i].tiles if tile.trainable):
                nbytes = round_up(tile.numel * self[tile.unit].itemsize, plan.alignment)
                self._kept[tile] = shared.generations.own(parameters_of(tile), nbytes)
        self.mirrors = Slots(shared.blocks(plan.mirror_slots, plan.mirror_slot_bytes), shared.in_flight)

    def allocated(self) -> None:
        """Orders copies into and out of homes after the work that was queued when their memory was allocated."""
        mark = self._streams.mark()
        for i in self:
            self._in_flight.begin(mark, ("home", i), writes=True)

    def _fresh(self, i: int) -> list[Any]:
        """The last copy into unit i's home."""
        return self._in_flight.of(("home", i))

    def fetch(self, tile: Tile) -> None:
        """Begins to copy the tile's values to a mirror, if one is free, and one more for a tile before it."""
        if len(self.mirrors.idle()) > 1:
            self.mirrors.try_take(tile, fill=self._fill)

    def borrow(self, tile: Tile, *, read: bool) -> Tensor:
        """The mirror (tile.numel,) on the host of a tile whose home is here. It has the tile's values if `read`."""
        mirror = self.mirrors.take(tile, fill=self._fill if read else None)
        mirror.wait_filled()
        return self._values(mirror)

    def _fill(self, mirror: Slot[Block]) -> None:
        values, tile = self._values(mirror), mirror.key
        mirror.fills(self._streams.copy("swap_out", values, self._home(tile), self._fresh(tile.unit)))
        self._in_flight.count("swap_out", values.nbytes)

    def _values(self, mirror: Slot[Block]) -> Tensor:
        tile = mirror.key
        return mirror.memory.view(self._plan.units[tile.unit].spec.dtype, tile.numel)

    def refresh(self, tile: Tile) -> None:
        """Begins to copy the mirror's values to the tile's home, and to disk if the tile is durable."""
        mirror = self.mirrors.take(tile, "refresh")  # and held for good if Ctrl-C comes between a copy and its mark
        values, kept = self._values(mirror), self._kept.get(tile)
        if kept is not None:
            mirror.leaves(kept.write(mirror.memory.raw(0, kept.nbytes), f"parameters of {tile}"))
        mark = self._streams.copy("swap_in", self._home(tile), values, self._fresh(tile.unit))
        self._in_flight.begin(mark, ("home", tile.unit), writes=True)
        mirror.leaves(mark)
        mirror.holders.clear()
        self.mirrors.give(mirror)
        self._in_flight.count("swap_in", values.nbytes)

    def restore(self, tile: Tile) -> None:
        """Copies an earlier process's values of the tile from disk to its home."""
        kept = self._kept[tile]

        def fill(mirror: Slot[Block]) -> None:
            mirror.fills(kept.read(mirror.memory.raw(0, kept.nbytes), f"parameters of {tile}"))

        self.mirrors.take(tile, fill=fill).wait_filled()
        self.refresh(tile)

    def give_back(self, i: int) -> None:
        """Gives back mirrors of unit i that are still kept, because they were only read."""
        for mirror in self.mirrors:
            if mirror.key is not None and mirror.key.unit == i:
                self.mirrors.give(mirror)

    def _home(self, tile: Tile) -> Tensor:
        return self[tile.unit][tile.start : tile.stop]

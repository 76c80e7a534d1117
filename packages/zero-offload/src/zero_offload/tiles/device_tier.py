"""Keeps units on a discrete device and updates them.

Owns two sorts of units:

    whole   parameters, gradient and states: updated there by zero-core's DeviceStore, in stream order
    home    parameters only: the states are on a slower tier, and the update thread changes a mirror on the host and
            copies it up

[Note: homes and mirrors]
The home of a unit is its parameters on the device. A tile's mirror is a slot of host memory in which the update thread
changes it. Only copies of the swap_in lane write a home, and the copies from it into a unit's memory, for forward and
backward, are in the same lane, so these happen one after another. An update that writes the whole tile needs no old
values. If it leaves elements out, or reads the parameter because that is the master or a part of it, the home is first
copied into the mirror, in the swap_out lane. That copy follows the last one into the home, and the update waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from zero_core.optim.device_store import DeviceStore
from zero_core.saved_bytes import give_memory, take_memory
from zero_core.store import GroupStep, ShardSpec, StoreContext

from ..arena import Block
from ..slots import Slot, Slots
from ..streams import Mark, Streams
from ..transfers import InFlight
from .footprint import StorePlan
from .tile import Tile
from .two_places import TwoPlaces

__all__ = ["DeviceTier"]


class DeviceTier:
    """One store's memory on a discrete device. The training thread calls it, but the update thread changes homes."""

    def __init__(self, streams: Streams, plan: StorePlan, mirrors: Sequence[Block], in_flight: InFlight) -> None:
        self._streams, self._plan, self._in_flight = streams, plan, in_flight
        self.whole = DeviceStore()  # every unit, by its number; those that are not whole have no elements there
        self.has_whole = any(unit.whole for unit in plan.units)
        self._homes = {i: streams.empty(u.spec.numel, u.spec.dtype) for i, u in enumerate(plan.units) if u.home}
        self._allocated()
        self._mirrors = Slots(mirrors, in_flight)

    def _allocated(self) -> None:
        """Orders copies into and out of homes after the work that was queued when their memory was allocated."""
        mark = self._streams.mark()
        for i in self._homes:
            self._in_flight.begin(mark, ("home", i), writes=True)

    def _fresh(self, i: int) -> list[Mark]:
        """The last copy into unit i's home."""
        return self._in_flight.of(("home", i))

    # -- whole units --------------------------------------------------------------------------------------------

    def attach(self, optimizer: torch.optim.Optimizer, initial: Callable[[int], Tensor], context: StoreContext) -> None:
        """Takes over the whole units. `initial(i)`: as in `ShardStore.attach`, but without elements for other units."""
        others = (ShardSpec(unit.spec.name, 0, unit.spec.dtype, (), trained=False) for unit in self._plan.units)
        specs = [unit.spec if unit.whole else other for unit, other in zip(self._plan.units, others, strict=True)]

        def rescue(i: int, master: Tensor) -> None:
            if specs[i].trained:
                context.rescue(i, master)

        # `copy_into` reads the shards in the parameter dtype, so they are kept at stages 1 and 2 too.
        on_device = replace(context, keeps_parameters=False, rescue=rescue)
        self.whole.attach(specs, optimizer, initial, context=on_device)

    def lend(self, i: int) -> Tensor | None:
        """The memory for a whole unit's gradient; None: the store has none to lend."""
        return self.whole.gradient_buffer(i)

    def accept(self, i: int, gradient: Tensor) -> None:
        """Adds a whole unit's gradient."""
        self.whole.accept_gradient(i, gradient)

    def discard(self) -> None:
        self.whole.discard_gradients()

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> None:
        """Queues the updates of whole units on the caller's stream."""
        here = [i for i in order if self._plan.units[i].whole]
        for i in here:
            self.follow_copies(i)
        self.whole.update(groups, scale, here, steps)

    def follow_copies(self, i: int) -> None:
        """Makes the caller's stream wait for the last copy out of a whole unit, so that it can change the unit."""
        for copy in self._in_flight.of(("whole", i)):
            self._streams.follow(copy)
        self._in_flight.forget(("whole", i))

    # -- units on their way into use ----------------------------------------------------------------------------

    def copy_into(self, i: int, out: Tensor, after: Mark) -> Mark | None:
        """Queues a copy of unit i to `out`, and returns its mark; None: its parameters are not on the device."""
        if self._plan.units[i].whole:
            mark = self._streams.copy("swap_in", out, self.whole.parameters(i), (after,))
            self._in_flight.begin(mark, ("whole", i), writes=False)
            return mark
        return self._streams.copy("swap_in", out, self._homes[i], (after,)) if i in self._homes else None

    # -- the update thread: homes -------------------------------------------------------------------------------

    def fetch(self, tile: Tile) -> None:
        """Begins to copy the tile's values to a mirror, if one is free, and one more for a tile before it."""
        if len(self._mirrors.idle()) > 1:
            self._mirrors.try_take(tile, fill=self._fill)

    def borrow(self, tile: Tile, *, read: bool) -> Tensor:
        """The mirror (tile.numel,) on the host of a tile whose home is here. It has the tile's values if `read`."""
        mirror = self._mirrors.find(tile) or self._mirrors.take(tile, fill=self._fill if read else None)
        mirror.wait_filled()
        return self._values(mirror)

    def _fill(self, mirror: Slot[Block]) -> None:
        values, tile = self._values(mirror), mirror.key
        mirror.fills(self._streams.copy("swap_out", values, self._home(tile), self._fresh(tile.unit)))
        self._in_flight.count("swap_out", values.nbytes)

    def _values(self, mirror: Slot[Block]) -> Tensor:
        tile = mirror.key
        return mirror.memory.view(self._plan.units[tile.unit].spec.dtype, tile.numel)

    def refresh(self, tile: Tile, kept: TwoPlaces | None = None) -> None:
        """Begins to copy the mirror's values to the tile's home, and to disk if the tile is durable."""
        mirror = self._mirrors.hold(tile, "refresh")  # and held for good if Ctrl-C comes between a copy and its mark
        assert mirror is not None
        values = self._values(mirror)
        if kept is not None:
            mirror.leaves(kept.write(mirror.memory.raw(0, kept.nbytes), f"parameters of {tile}"))
        mark = self._streams.copy("swap_in", self._home(tile), values, self._fresh(tile.unit))
        self._in_flight.begin(mark, ("home", tile.unit), writes=True)
        mirror.leaves(mark)
        mirror.holders.clear()
        self._mirrors.give(mirror)
        self._in_flight.count("swap_in", values.nbytes)

    def restore(self, tile: Tile, kept: TwoPlaces) -> None:
        """Copies an earlier process's values of the tile from disk to its home."""

        def fill(mirror: Slot[Block]) -> None:
            mirror.fills(kept.read(mirror.memory.raw(0, kept.nbytes), f"parameters of {tile}"))

        self._mirrors.take(tile, fill=fill).wait_filled()
        self.refresh(tile)

    def give_back(self, i: int) -> None:
        """Gives back mirrors of unit i that are still kept, because they were only read."""
        for mirror in self._mirrors:
            if mirror.key is not None and mirror.key.unit == i:
                self._mirrors.give(mirror)

    # -- asleep ---------------------------------------------------------------------------------------------------

    def values(self) -> list[Tensor]:
        """Every tensor on the device whose values are nowhere else, in a fixed order. Every lane is empty."""
        return [*self._homes.values(), *self.whole.values()]

    def let_go(self) -> None:
        """Frees the device's memory."""
        self._mirrors.forget()
        give_memory(self._homes.values())
        self.whole.let_go()

    def take_back(self) -> None:
        """The inverse of `let_go`; the values are undefined."""
        take_memory(self._homes.values())
        self.whole.take_back()

    def restored(self) -> None:
        """Called when the tensors of `values` are filled again, in the order of the caller's stream."""
        self.whole.restored()
        self._allocated()
        for i in range(len(self._plan.units)):
            self._in_flight.forget(("whole", i))

    def _home(self, tile: Tile) -> Tensor:
        return self._homes[tile.unit][tile.start : tile.stop]

    def close(self) -> None:
        self.whole.close()
        give_memory(self._homes.values())

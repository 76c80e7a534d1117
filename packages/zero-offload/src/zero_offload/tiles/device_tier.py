"""The device tier of a discrete device: units that stay there, and what updates them.

Owns two sorts of units, and nothing of the others:

    whole   parameters, gradient and states: updated there by zero-core's DeviceStore, in stream order
    home    the parameters alone: the states are on a slower tier, and the update thread changes a mirror on the host
            and copies it up

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
from zero_core.store import GroupStep, StoreContext

from ..arena import Block
from ..slots import Slot, Slots
from ..streams import Mark, Streams
from ..transfers import InFlight
from .footprint import StorePlan
from .tile import Tile
from .two_places import TwoPlaces

__all__ = ["DeviceTier"]


class DeviceTier:
    """What one store keeps on a discrete device. The training thread's; but the update thread changes homes."""

    def __init__(self, streams: Streams, plan: StorePlan, mirrors: Sequence[Block], in_flight: InFlight) -> None:
        self._streams, self._plan, self._in_flight = streams, plan, in_flight
        self._whole = DeviceStore()
        whole = (i for i, unit in enumerate(plan.units) if unit.whole)
        self._place = {i: place for place, i in enumerate(whole)}  # unit -> its number in the DeviceStore
        self._homes = {i: streams.empty(u.spec.numel, u.spec.dtype) for i, u in enumerate(plan.units) if u.home}
        self._allocated()
        self._mirrors = Slots(mirrors, in_flight)

    def _allocated(self) -> None:
        """Copies into homes, and out of them, come after what was queued when the allocator gave them their memory."""
        mark = self._streams.mark()
        for i in self._homes:
            self._in_flight.begin(mark, ("home", i), writes=True)

    def _fresh(self, i: int) -> list[Mark]:
        """The last copy into unit i's home."""
        return self._in_flight.of(("home", i))

    # -- whole units --------------------------------------------------------------------------------------------

    def attach(self, optimizer: torch.optim.Optimizer, master: Callable[[int], Tensor], context: StoreContext) -> None:
        """`master(i)`: fp32 (shard_numel,) of unit i, asked for in order, for the whole units."""
        whole = list(self._place)
        if whole:
            self._whole.attach(
                [self._plan.units[i].spec for i in whole],
                optimizer,
                lambda place: master(whole[place]),
                context=replace(context, keeps_parameters=False),  # what units are copied from stays
            )

    def lend(self, i: int) -> Tensor | None:
        """The memory of a whole unit's gradient."""
        return self._whole.gradient_buffer(self._place[i])

    def accept(self, i: int, gradient: Tensor) -> None:
        """Add a whole unit's gradient."""
        self._whole.accept_gradient(self._place[i], gradient)

    def discard(self) -> None:
        if self._place:
            self._whole.discard_gradients()

    def zero(self, i: int, start: int, stop: int) -> None:
        self._whole.discard_gradient(self._place[i], start, stop)

    def read_gradient(self, i: int, start: int, stop: int) -> Tensor:
        return self._whole.read_gradient(self._place[i], start, stop).to("cpu")

    def write_gradient(self, i: int, start: int, values: Tensor) -> None:
        self._whole.write_gradient(self._place[i], start, values)

    def norm_squared(self) -> Tensor | None:
        """() float64 on the device; None where nothing is whole here."""
        return self._whole.gradient_norm_squared() if self._place else None

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> None:
        """Queue the updates of whole units on the caller's stream."""
        here = [i for i in order if i in self._place]
        for i in here:
            self._follow_copies(i)
        if here:
            self._whole.update(groups, scale, [self._place[i] for i in here], [steps[i] for i in self._place])

    def read(self, i: int, name: str, start: int, stop: int) -> Tensor:
        return self._whole.read_state(self._place[i], name, start, stop).to("cpu")

    def write(self, i: int, name: str, start: int, values: Tensor) -> None:
        self._follow_copies(i)
        self._whole.write_state(self._place[i], name, start, values)

    def read_shaped(self, i: int, k: int, name: str, start: int, stop: int) -> Tensor:
        return self._whole.read_shaped(self._place[i], k, name, start, stop).to("cpu")

    def write_shaped(self, i: int, k: int, name: str, start: int, values: Tensor) -> None:
        self._follow_copies(i)
        self._whole.write_shaped(self._place[i], k, name, start, values)

    def give_up(self, i: int) -> None:
        """Frees the memory of a whole unit, see `ShardStore.give_up`."""
        self._streams.drain()
        self._whole.give_up(self._place[i])

    def take_up(self, i: int) -> None:
        self._whole.take_up(self._place[i])
        self._in_flight.forget(("whole", i))

    def _follow_copies(self, i: int) -> None:
        """The caller's stream changes a whole unit after the last copy out of it."""
        for copy in self._in_flight.of(("whole", i)):
            self._streams.follow(copy)
        self._in_flight.forget(("whole", i))

    # -- units on their way into use ----------------------------------------------------------------------------

    def copy_into(self, i: int, out: Tensor, after: Mark) -> Mark | None:
        """Queue a copy of unit i to `out`, and return its mark; None: its parameters are not here."""
        if i in self._place:
            mark = self._streams.copy("swap_in", out, self._whole.parameters(self._place[i]), (after,))
            self._in_flight.begin(mark, ("whole", i), writes=False)
            return mark
        return self._streams.copy("swap_in", out, self._homes[i], (after,)) if i in self._homes else None

    # -- the update thread: homes -------------------------------------------------------------------------------

    def fetch(self, tile: Tile) -> None:
        """Begin to copy the tile's values down, if a mirror can be had now, and one is left for a tile before it."""
        if len(self._mirrors.idle()) > 1:
            self._mirrors.try_take(tile, fill=self._fill)

    def borrow(self, tile: Tile, *, read: bool) -> Tensor:
        """(tile.numel,) on the host, for a tile that has its home here; its values, if they are `read`."""
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
        """The mirror's values go home, and to disk where the tile is durable."""
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
        """An earlier process's values of the tile come home."""

        def fill(mirror: Slot[Block]) -> None:
            mirror.fills(kept.read(mirror.memory.raw(0, kept.nbytes), f"parameters of {tile}"))

        self._mirrors.take(tile, fill=fill).wait_filled()
        self.refresh(tile)

    def give_back(self, i: int) -> None:
        """Mirrors of unit i's that were only read."""
        for mirror in self._mirrors:
            if mirror.key is not None and mirror.key.unit == i:
                self._mirrors.give(mirror)

    # -- asleep ---------------------------------------------------------------------------------------------------

    def values(self) -> list[Tensor]:
        """Every tensor on the device whose values are nowhere else, in a fixed order. Every lane is empty."""
        return [*self._homes.values(), *self._whole.values()]

    def let_go(self) -> None:
        """Free the device's memory."""
        self._mirrors.forget()
        give_memory(self._homes.values())
        self._whole.let_go()

    def take_back(self) -> None:
        """The inverse, with any values."""
        take_memory(self._homes.values())
        self._whole.take_back()

    def restored(self) -> None:
        """`values` are there again, in the order of the caller's stream."""
        self._whole.restored()
        self._allocated()
        for i in self._place:
            self._in_flight.forget(("whole", i))

    def _home(self, tile: Tile) -> Tensor:
        return self._homes[tile.unit][tile.start : tile.stop]

    def close(self) -> None:
        self._whole.close()
        give_memory(self._homes.values())

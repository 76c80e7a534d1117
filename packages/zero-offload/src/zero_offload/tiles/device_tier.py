"""The device tier where the compute device is apart from the host: tiles that stay there, and what updates them.

Owns two sorts of leading tiles of a unit, and nothing of the others:

    | whole: parameter, gradient, states | home: the parameter alone | ... on host or nvme |
      updated there by zero-core's         its states are below: the update thread changes a mirror on the host and
      DeviceStore, in stream order         copies it up

[Note: homes and mirrors]
The home of a tile is its parameter on the device. Its mirror is a slot of host memory in which the update thread
changes it. Only copies of the swap_in lane write a home, and the copies from it into a unit's memory, for forward and
backward, are in the same lane, so these happen one after another. An update that writes the whole tile needs no old
values. If it leaves elements out, or reads the parameter because that is the master or a part of it, the home is first
copied into the mirror, in the swap_out lane. That copy follows the last one into the home, and the update waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zero_core.aside import give_memory, take_memory
from zero_core.optim.device_store import DeviceStore
from zero_core.store import GroupStep, ShardSpec, StoreContext

from ..arena import Block
from ..slots import Slot, Slots
from ..streams import Mark, Streams
from .footprint import StorePlan
from .tile import Tile

__all__ = ["DeviceTier"]


class DeviceTier:
    """What one store keeps on a device apart. The training thread's, but for homes: the update thread changes them."""

    def __init__(self, streams: Streams, plan: StorePlan, mirrors: Sequence[Block]) -> None:
        self._streams, self._plan = streams, plan
        self._whole = DeviceStore()
        self._place: dict[int, int] = {}  # unit -> its number in the DeviceStore
        self._segments: dict[int, list[int]] = {}  # unit -> which of its segments are there
        self._left: dict[int, Mark] = {}  # unit -> the last copy out of what is whole
        self._homes: list[Tensor] = []
        for unit in plan.units:
            numel = unit.device_numel(unit.parameter_tiers) - unit.whole_numel
            self._homes.append(streams.empty(numel, unit.spec.dtype))
        # By unit, the last copy into its home; at first what had been queued when the allocator gave it its memory.
        allocated = streams.mark()
        self._fresh: dict[int, Mark] = {i: allocated for i, home in enumerate(self._homes) if home.numel()}
        self._mirrors = Slots(mirrors)
        self.up_bytes = self.down_bytes = 0

    # -- whole tiles --------------------------------------------------------------------------------------------

    def attach(self, optimizer: torch.optim.Optimizer, master: Callable[[int], Tensor], context: StoreContext) -> None:
        """`master(i)`: fp32 (shard_numel,) of unit i, asked for in order, for the units with whole tiles."""
        specs: list[ShardSpec] = []
        for i, unit in enumerate(self._plan.units):
            if unit.whole_numel:
                kept = [k for k, segment in enumerate(unit.spec.segments) if segment.start < unit.whole_numel]
                clipped = (unit.spec.segments[k] for k in kept)
                cut = tuple(replace(part, stop=min(part.stop, unit.whole_numel)) for part in clipped)
                self._place[i], self._segments[i] = len(specs), kept
                specs.append(replace(unit.spec, numel=unit.whole_numel, segments=cut))
        if specs:
            units = list(self._place)
            self._whole.attach(
                specs,
                optimizer,
                lambda place: master(units[place])[: specs[place].numel].clone(),
                context=replace(context, keeps_parameters=False),  # what units are copied from stays
            )

    def has(self, i: int) -> bool:
        """Whether unit i has whole tiles."""
        return i in self._place

    def has_all(self, i: int) -> bool:
        """Whether all of unit i's tiles are whole."""
        return i in self._place and self._plan.units[i].whole_numel == self._plan.units[i].spec.numel

    def lend(self, i: int) -> Tensor | None:
        """The memory of the gradient of a unit that is all here."""
        return self._whole.gradient_buffer(self._place[i])

    def accept(self, i: int, gradient: Tensor) -> None:
        """Add the leading elements of unit i's gradient."""
        self._whole.accept_gradient(self._place[i], gradient[: self._plan.units[i].whole_numel])

    def discard(self) -> None:
        if self._place:
            self._whole.discard_gradients()

    def zero(self, i: int, start: int, stop: int) -> None:
        stop = min(stop, self._plan.units[i].whole_numel)
        if start < stop:
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
        """Queue the updates of whole tiles on the caller's stream."""
        here = [i for i in order if i in self._place]
        for i in here:
            if i in self._left:
                self._streams.follow(self._left.pop(i))
        mine = [[steps[i][k] for k in kept] for i, kept in self._segments.items()]
        if here:
            self._whole.update(groups, scale, [self._place[i] for i in here], mine)

    def switch_options(self, group: int, before: Sequence[Mapping[str, Any]], what: str) -> None:
        if self._place:
            self._whole.switch_options(group, before, what)

    def read(self, i: int, name: str, start: int, stop: int) -> Tensor:
        return self._whole.read_state(self._place[i], name, start, stop).to("cpu")

    def write(self, i: int, name: str, start: int, values: Tensor) -> None:
        if i in self._left:
            self._streams.follow(self._left.pop(i))
        self._whole.write_state(self._place[i], name, start, values)

    # -- units on their way into use ----------------------------------------------------------------------------

    def copy_into(self, i: int, out: Tensor, after: Mark) -> Mark | None:
        """Queue copies of what unit i has here to the beginning of `out`; the last one's mark."""
        unit, mark = self._plan.units[i], None
        start = unit.whole_numel
        if start:
            mark = self._streams.copy("swap_in", out[:start], self._whole.parameters(self._place[i]), (after,))
            self._left[i] = mark
        stop = start + self._homes[i].numel()
        if start < stop:
            mark = self._streams.copy("swap_in", out[start:stop], self._homes[i], (after,))
        return mark

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
        mirror.filling.append(self._streams.copy("swap_out", values, self._home(tile), (self._fresh[tile.unit],)))
        self.down_bytes += values.nbytes

    def _values(self, mirror: Slot[Block]) -> Tensor:
        tile = mirror.key
        return mirror.memory.view(self._plan.units[tile.unit].spec.dtype, tile.numel)

    def refresh(self, tile: Tile) -> None:
        """The mirror's values go home."""
        mirror = self._mirrors.hold(tile, "refresh")  # and held for good if Ctrl-C comes between a copy and its mark
        assert mirror is not None
        values = self._values(mirror)
        mark = self._streams.copy("swap_in", self._home(tile), values, (self._fresh[tile.unit],))
        self._fresh[tile.unit] = mirror.leaving[None] = mark
        mirror.holders.clear()
        self._mirrors.give(mirror)
        self.up_bytes += values.nbytes

    def give_back(self, i: int) -> None:
        """Mirrors of unit i's that were only read."""
        for mirror in self._mirrors:
            if mirror.key is not None and mirror.key.unit == i:
                self._mirrors.give(mirror)

    # -- asleep ---------------------------------------------------------------------------------------------------

    def values(self) -> list[Tensor]:
        """Every tensor on the device whose values are nowhere else, in a fixed order. Every lane is empty."""
        return [*(home for home in self._homes if home.numel()), *self._whole.values()]

    def let_go(self) -> None:
        """Free the device's memory."""
        self._mirrors.forget()
        give_memory(self._homes)
        self._whole.let_go()

    def take_back(self) -> None:
        """The inverse, with any values."""
        take_memory(self._homes)
        self._whole.take_back()

    def restored(self) -> None:
        """`values` are there again, in the order of the caller's stream."""
        self._whole.restored()
        self._fresh = dict.fromkeys(self._fresh, self._streams.mark())
        self._left.clear()

    def _home(self, tile: Tile) -> Tensor:
        start = tile.start - self._plan.units[tile.unit].whole_numel
        return self._homes[tile.unit][start : start + tile.numel]

    def close(self) -> None:
        self._whole.close()
        self._homes.clear()

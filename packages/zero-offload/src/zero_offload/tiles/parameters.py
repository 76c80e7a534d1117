"""Parameters by tier: whole shards in host memory, or streamed through unit slots.

Owns the host copies, the extents and who may use which unit slot. It computes nothing.

[Note: a unit slot's life]
    EMPTY ──read──> WANTED ──acquire──> HELD ──release──> idle ──claimed──> another unit
                       ▲                                   │
                       └──── end_update <── UPDATING <─────┘ begin_update
A WANTED slot (prefetched, or freshly updated and not yet used) is claimed only when nothing else can move: by the
training thread for the unit it needs now, or while that thread is blocked. A freshly updated unit is so handed to its
forward from memory. A slot is claimed only after its writes are done: no read ever overtakes a write.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from torch import Tensor

from ..arena import Arena, Block
from ..errors import BudgetError
from ..monitor import Monitor
from ..protocols import Extent
from ..streams import Mark
from ..tier import Tier, Transfer, Transfers
from .device_tier import DeviceTier
from .footprint import StorePlan, UnitPlan
from .tile import Tile, round_up

__all__ = ["ParameterStore"]


@dataclass
class _UnitSlot:
    block: Block
    unit: int | None = None
    held: bool = False
    wanted: bool = False
    updating: bool = False
    used: int = 0
    reads: list[Transfer] = field(default_factory=list)
    leaving: list[Mark] = field(default_factory=list)  # copies to the device that read it
    writes: dict[Tile, Transfer] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return self.held or self.updating

    @property
    def moving(self) -> tuple[Transfer | Mark, ...]:
        """What is in flight into it or out of it."""
        return tuple(each for each in (*self.reads, *self.writes.values(), *self.leaving) if not each.done())

    def drain(self) -> None:
        """Return when nothing is in flight. Raises the first transfer's error."""
        for each in (*self.reads, *self.writes.values(), *self.leaving):
            each.wait()
        self.leaving.clear()
        self.reads.clear()
        self.writes.clear()


class ParameterStore:
    """Unit i's parameters as host memory: (shard_numel,) parameter dtype, less what leads them on a device apart."""

    def __init__(
        self, plan: StorePlan, arena: Arena, nvme: Transfers | None, monitor: Monitor, device: DeviceTier | None = None
    ) -> None:
        self._plan, self._nvme, self._monitor, self._device = plan, nvme, monitor, device
        self._above = [unit.device_numel(unit.parameter_tiers) for unit in plan.units]  # leading elements, not here
        self._memory: list[Block] = []  # the tiles after them that are not on nvme
        self._memory_numel: list[int] = []
        self._extents: list[Extent | None] = []
        for unit in plan.units:
            numel = unit.memory_numel(unit.parameter_tiers)
            self._memory.append(arena.take(numel * unit.spec.dtype.itemsize))
            self._memory_numel.append(numel)
            above = unit.device_numel(unit.parameter_tiers)
            behind = round_up((unit.spec.numel - above - numel) * unit.spec.dtype.itemsize, plan.alignment)
            self._extents.append(nvme.own(behind) if behind and nvme is not None else None)
        self._slots = [_UnitSlot(arena.take(plan.unit_slot_bytes)) for _ in range(plan.unit_slots)]
        self._own = {
            i: _UnitSlot(arena.take(round_up(plan.units[i].parameter_bytes, plan.alignment))) for i in plan.own_slots
        }
        self._by_unit: dict[int, _UnitSlot] = {}
        self._leaving: dict[int, Mark] = {}  # the last copy to the device of a unit that is not streamed
        self._clock = 0

    def streamed(self, i: int) -> bool:
        """Whether unit i goes through unit slots."""
        return self._extents[i] is not None

    # -- the training thread ------------------------------------------------------------------------------------

    def prefetch(self, i: int) -> None:
        """Begin to read unit i if a slot is idle and nothing moves in it any more; waits for nothing."""
        with self._monitor.condition:
            if not self.streamed(i):
                return
            slot = self._by_unit.get(i) or self._load(i, steal=False, wait=False)
            if slot is not None:
                slot.wanted = True
                self._touch(slot)

    def acquire(self, i: int) -> Tensor:
        """With a storage of its own, valid until release(i)."""
        unit = self._plan.units[i]
        numel = unit.spec.numel - self._above[i]
        if not self.streamed(i):
            return self._memory[i].view(unit.spec.dtype, numel)
        with self._monitor.condition:
            slot = self._by_unit.get(i) or self._load(i, steal=True, wait=False)
            if slot is None:
                with self._monitor.exposed(unit.spec.name):
                    slot = self._load(i, steal=True)
            if slot is None:
                self._monitor.wait_until(lambda: self._load_or_refuse(i), unit.spec.name)
                slot = self._by_unit[i]
            slot.held, slot.wanted = True, False
            self._touch(slot)
        try:
            if not all(transfer.done() for transfer in slot.reads):
                with self._monitor.exposed(unit.spec.name):
                    self._arrived(slot)
            self._arrived(slot)
        except BaseException:
            self.release(i)  # Ctrl-C: the caller was given nothing that it could release
            raise
        return slot.block.view(unit.spec.dtype, numel)

    def arrived(self, i: int) -> bool:
        """Whether acquire(i) would return at once. Asked under the condition."""
        if not self.streamed(i):
            return True
        slot = self._by_unit.get(i)
        return slot is not None and all(transfer.done() for transfer in slot.reads)

    def leaving(self, i: int, mark: Mark) -> None:
        """A copy of acquired unit i to the device is done with `mark`; until then its memory does not change."""
        with self._monitor.condition:
            slot = self._by_unit.get(i)
            if slot is None:
                self._leaving[i] = mark
            else:
                slot.leaving = [each for each in slot.leaving if not each.done()] + [mark]

    def release(self, i: int) -> None:
        with self._monitor.condition:
            slot = self._by_unit.get(i)
            if slot is not None:
                slot.held = False
                self._monitor.condition.notify_all()

    def _load_or_refuse(self, i: int) -> bool:
        if self._by_unit.get(i) or self._load(i, steal=True):
            return True
        self._refuse_if_all_held(i)
        return False

    def _refuse_if_all_held(self, i: int) -> None:
        if all(slot.held for slot in self._slots):
            units = self._plan.units
            names = ", ".join(sorted(units[slot.unit].spec.name for slot in self._slots if slot.unit is not None))
            raise BudgetError(
                f"unit {units[i].spec.name} wants a unit slot and all {len(self._slots)} are held, by {names}; "
                "raise prefetch_bytes (there are prefetch + 2 slots), use stage 3 with resident_bytes=0, "
                'or put parameters on the "host"'
            )

    # -- the update thread --------------------------------------------------------------------------------------

    def begin_update(self, i: int, *, wait: bool, read: bool = True, steal: bool = False) -> bool:
        """Make unit i's parameters changeable in memory. False: no slot can be had without waiting.

        `read=False`: every element will be written, so that what is stored need not be read. `steal`: also from a slot
        whose unit is still wanted.
        """
        if not self.streamed(i):
            return True
        while True:
            with self._monitor.condition:
                steal_now = steal or self._monitor.blocked
                slot = self._by_unit.get(i) or self._load(i, steal=steal_now, read=read, wait=steal)
                if slot is not None:
                    slot.updating = True
                    return True
                if not wait:
                    return False
                self._monitor.check_stop()
                idle = self._idle(i, steal=steal_now)
                if not idle:
                    if self._monitor.blocked:
                        self._refuse_if_all_held(i)
                    self._monitor.condition.wait()
                    self._monitor.check_stop()
                    continue
                moving = min(idle, key=lambda each: each.used).moving
            for transfer in moving:  # not under the condition: the training thread goes on meanwhile
                transfer.wait()

    def at_hand(self, tile: Tile) -> bool:
        """Whether for_update would return at once, and use no mirror."""
        if tile.start < self._above[tile.unit]:
            return False
        if not self.streamed(tile.unit):
            left = self._leaving.get(tile.unit)
            return left is None or left.done()
        slot = self._by_unit[tile.unit]
        written = slot.writes.get(tile)
        return all(each.done() for each in (*slot.reads, *slot.leaving)) and (written is None or written.done())

    def for_update(self, tile: Tile, *, read: bool = True) -> Tensor:
        """(tile.numel,) to be changed in place; waits for its read, its last write and its last copy to the device.

        `read=False`: every element will be written, so that a tile from a device apart need not be copied here.
        """
        dtype = self._plan.units[tile.unit].spec.dtype
        start = (tile.start - self._above[tile.unit]) * dtype.itemsize
        if start < 0:
            assert self._device is not None
            return self._device.borrow(tile, read=read)
        if not self.streamed(tile.unit):
            left = self._leaving.pop(tile.unit, None)
            if left is not None:
                left.wait()
            return self._memory[tile.unit].view(dtype, tile.numel, start)
        slot = self._by_unit[tile.unit]
        self._arrived(slot)
        for mark in slot.leaving:
            mark.wait()
        if tile in slot.writes:
            slot.writes[tile].wait()
            del slot.writes[tile]
        return slot.block.view(dtype, tile.numel, start)

    def fetch(self, tile: Tile) -> None:
        """The tile's old values will be asked for soon: begin to bring them, if they live on a device apart."""
        if self._device is not None and tile.start < self._above[tile.unit]:
            self._device.fetch(tile)

    def changed(self, tile: Tile) -> None:
        """The tile's new values go where they live."""
        unit = self._plan.units[tile.unit]
        size = unit.spec.dtype.itemsize
        start = (tile.start - self._above[tile.unit]) * size
        if start < 0:
            assert self._device is not None
            self._device.refresh(tile)
            return
        if not self.streamed(tile.unit):
            return
        slot = self._by_unit[tile.unit]
        if unit.parameter_tiers[tile.index] is Tier.NVME:
            stop = start + round_up(tile.numel * size, self._plan.alignment)
            slot.writes[tile] = self._write(tile.unit, slot.block.raw(start, stop), start, f"parameters of {tile}")
        else:
            home = self._memory[tile.unit].view(unit.spec.dtype, tile.numel, start)
            home.copy_(slot.block.view(unit.spec.dtype, tile.numel, start))

    def end_update(self, i: int, *, wanted: bool = True) -> None:
        """Unit i waits in its slot for its next use, if it is `wanted` soon."""
        if self._device is not None:
            self._device.give_back(i)
        with self._monitor.condition:
            slot = self._by_unit.get(i)
            if slot is not None:
                slot.updating, slot.wanted = False, wanted
                self._touch(slot)
            self._monitor.condition.notify_all()

    # -- attach, checkpoints ------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Return when nothing is in flight."""
        for slot in (*self._slots, *self._own.values()):
            slot.drain()

    def forget_writes(self) -> set[int]:
        """Every write is over, done or failed; the units that are in slots, where their bytes are in any case."""
        for slot in (*self._slots, *self._own.values()):
            for write in slot.writes.values():
                with suppress(Exception):
                    write.wait()
            slot.writes.clear()
        return set(self._by_unit)

    # -- the slots ----------------------------------------------------------------------------------------------

    def _touch(self, slot: _UnitSlot) -> None:
        self._clock += 1
        slot.used = self._clock

    def _idle(self, i: int, *, steal: bool) -> list[_UnitSlot]:
        """The slots that unit i may claim."""
        slots = [self._own[i]] if i in self._own else self._slots
        return [slot for slot in slots if not slot.busy and (steal or not slot.wanted)]

    def _load(self, i: int, *, steal: bool, read: bool = True, wait: bool = True) -> _UnitSlot | None:
        """A slot with unit i's read under way, or None. The caller has the condition.

        `wait`: a slot may be waited for whose last bytes are still moving.
        """
        idle = [slot for slot in self._idle(i, steal=steal) if wait or not slot.moving]
        if not idle:
            return None
        # Empty first; then what is not wanted, longest unused; then the wanted one whose use is farthest: the newest.
        slot = min(idle, key=lambda s: (s.unit is not None, s.wanted, -s.used if s.wanted else s.used))
        slot.drain()
        if slot.unit is not None:
            del self._by_unit[slot.unit]
        slot.unit, slot.wanted = i, False
        self._by_unit[i] = slot
        self._touch(slot)
        if read:
            self._read(i, self._plan.units[i], slot)
        return slot

    def _read(self, i: int, unit: UnitPlan, slot: _UnitSlot) -> None:
        extent, nvme = self._extents[i], self._nvme
        assert extent is not None and nvme is not None
        numel, size = self._memory_numel[i], unit.spec.dtype.itemsize
        if numel:
            slot.block.view(unit.spec.dtype, numel).copy_(self._memory[i].view(unit.spec.dtype, numel))
        start = numel * size
        stop = start + round_up((unit.spec.numel - self._above[i] - numel) * size, self._plan.alignment)
        slot.reads.append(nvme.read(extent, slot.block.raw(start, stop), f"parameters of {unit.spec.name}"))

    def _write(self, i: int, source: Tensor, start: int, what: str) -> Transfer:
        extent, nvme = self._extents[i], self._nvme
        assert extent is not None and nvme is not None
        offset = start - self._memory_numel[i] * self._plan.units[i].spec.dtype.itemsize
        return nvme.write(extent, source, what, offset)

    @staticmethod
    def _arrived(slot: _UnitSlot) -> None:
        for transfer in slot.reads:
            transfer.wait()

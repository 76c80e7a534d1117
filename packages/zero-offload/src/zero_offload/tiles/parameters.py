"""Keeps parameters by tier: as whole shards in host memory, or streamed through unit slots.

Owns the host copies, the extents, and the choice of who uses which unit slot. It computes nothing.

[Note: who uses a unit slot]
The training thread holds it between acquire and release, the update thread between begin_update and end_update. A unit
that was prefetched, or that was updated and has not been used since, is wanted. Its slot is taken away only if no
other slot can be had at once, and only by the training thread for the unit that it needs now, or by the update thread
while the training thread is blocked. So forward usually finds a unit that was just updated still in memory.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..durable.ab_places import TwoPlaces, parameters_of
from ..errors import BudgetError
from ..layout.tile import Tile, round_up
from ..memory.arena import Block
from ..memory.slots import Slot, Slots
from ..memory.transfers import Stored
from ..streams import Mark
from .device_tier import Homes
from .store_context import Shared

USED, UPDATED = "used", "updated"  # who holds a slot


class ParameterStore:
    """Units' parameters in host memory: (shard_numel,) parameter dtype. Homes on a discrete device have none here."""

    def __init__(self, shared: Shared, homes: Homes | None = None) -> None:
        self._plan, self._monitor, self._in_flight, self._homes = shared.plan, shared.monitor, shared.in_flight, homes
        plan, arena, generations = shared.plan, shared.arena, shared.generations
        self._memory: list[Block] = []  # the tiles that are not stored
        self._memory_numel: list[int] = []
        # By unit, of each tile after those: its place, and the bytes [first, stop) of the unit's slot that are stored.
        self._stored: list[dict[Tile, tuple[Stored | TwoPlaces, int, int]]] = []
        self._copied: dict[Tile, TwoPlaces] = {}  # the places to which a commit copies tiles in host memory
        for unit in plan.units:
            numel = unit.memory_numel(unit.parameter_tiers)
            self._memory.append(arena.take(numel * unit.spec.dtype.itemsize))
            self._memory_numel.append(numel)
            self._stored.append({})
            for tile, tier in zip(unit.tiles, unit.parameter_tiers, strict=True):
                durable = generations if tile.trainable else None  # every process sets frozen tiles
                name, (first, stop) = parameters_of(tile), self._bytes(tile)
                nbytes = round_up(stop - first, plan.alignment)
                if tier.stored:
                    own = shared.stores[tier].own if durable is None else partial(durable.own, name)
                    if tile is unit.tiles[-1]:  # whole blocks make direct I/O fast, and a slot ends with one
                        stop = min(first + nbytes, round_up(stop, plan.alignment))
                    self._stored[-1][tile] = own(nbytes), first, stop
                elif durable is not None and not unit.home:
                    self._copied[tile] = durable.own(name, nbytes, partial(self._memory[-1].raw, first, stop))
        self._shared = shared.pool(plan.unit_slots, plan.unit_slot_bytes)
        sizes = {i: round_up(plan.units[i].parameter_bytes, plan.alignment) for i in plan.own_slots}
        self._own = {i: shared.pool(1, size) for i, size in sizes.items()}
        sharing = {i for i, stored in enumerate(self._stored) if stored and i not in self._own}
        # Units whose slot no other unit ever takes are not written until their memory is given away.
        fit = len(sharing) <= plan.unit_slots
        self._staying = {*self._own, *(sharing if fit else ())} if generations is None else set[int]()

    def streamed(self, i: int) -> bool:
        """Whether unit i goes through unit slots."""
        return bool(self._stored[i])

    def _slots(self, i: int) -> Slots[Block]:
        return self._own.get(i, self._shared)

    # -- the training thread ------------------------------------------------------------------------------------

    def prefetch(self, i: int) -> None:
        """Begins to read unit i if a slot is idle and has no request in flight. Never waits."""
        if not self.streamed(i):
            return
        slots = self._slots(i)
        slot = slots.try_take(i, fill=partial(self._read, i))
        if slot is not None:
            slots.keep(slot, due=slots.tick())

    def acquire(self, i: int) -> Tensor:
        """Unit i's parameters as a tensor with its own storage, valid until release(i)."""
        unit = self._plan.units[i]
        if not self.streamed(i):
            return self._memory[i].view(unit.spec.dtype, self._memory_numel[i])
        slots, read = self._slots(i), partial(self._read, i)
        slot = slots.try_take(i, USED, fill=read, steal=True)
        if slot is None:

            def let_go() -> bool:
                return bool(slots.idle()) or self._refuse_if_all_held(i)

            with self._monitor.exposed(unit.spec.name):
                blocked = partial(self._monitor.wait_until, let_go, unit.spec.name)
                slot = slots.take(i, USED, fill=read, blocked=blocked)
        slot.due = None
        try:
            with self._monitor.exposed(unit.spec.name, unless=slot.filled()):
                slot.wait_filled()
        except BaseException:
            self.release(i)  # Ctrl-C: the caller was given nothing that it could release
            raise
        return slot.memory.view(unit.spec.dtype, unit.spec.numel)

    def arrived(self, i: int) -> bool:
        """Whether acquire(i) would return at once. Asked under the condition."""
        if not self.streamed(i):
            return True
        slot = self._slots(i).find(i)
        return slot is not None and slot.filled()

    def leaving(self, i: int, mark: Mark) -> None:
        """Records a copy of acquired unit i to the device, which ends with `mark`. Until then its memory is kept."""
        with self._monitor.condition:
            self._in_flight.begin(mark, self._slots(i).find(i) or self._memory[i], writes=False)

    def release(self, i: int) -> None:
        with self._monitor.condition:
            slot = self._slots(i).find(i)
            if slot is not None and USED in slot.holders:
                self._slots(i).keep(slot, USED, due=slot.due)

    def _refuse_if_all_held(self, i: int) -> bool:
        """False. Raises BudgetError if the training thread itself holds all slots."""
        held = [slot.key for slot in self._shared if USED in slot.holders]
        if len(held) == len(self._shared):
            names = ", ".join(sorted(unit.spec.name for j, unit in enumerate(self._plan.units) if j in held))
            raise BudgetError(
                f"unit {self._plan.units[i].spec.name} needs a slot in host memory, and all {len(held)} are in use by "
                f'{names}; set parameters="host". Or raise prefetch_bytes to the bytes of all units that are in use at '
                "the same time (with create_graph=True: all units of the graph)"
            )
        return False

    # -- the update thread --------------------------------------------------------------------------------------

    def begin_update(self, i: int, *, wait: bool, read: bool = True, steal: bool = False) -> bool:
        """Makes unit i's parameters changeable in memory. False: no slot can be had without waiting.

        `read=False`: every element will be written, so the stored values need not be read. `steal`: a slot whose unit
        is still wanted may be taken too.
        """
        if not self.streamed(i):
            return True
        slots, fill = self._slots(i), partial(self._read, i) if read else None

        def stealing() -> bool:
            return steal or self._monitor.blocked

        slot = slots.try_take(i, UPDATED, fill=fill, steal=stealing())
        if slot is None and wait:
            blocked = partial(self._wait_for_change, i, steal)
            slot = slots.take(i, UPDATED, fill=fill, steal=stealing, blocked=blocked)
        return slot is not None

    def _wait_for_change(self, i: int, steal: bool) -> None:
        """Sleeps until something changes. Raises BudgetError if no other thread can change anything."""
        if steal:
            name = self._plan.units[i].spec.name
            raise BudgetError(f"every unit slot is held; release a unit before reading {name}")
        self._monitor.check_stop()
        if self._monitor.blocked:
            self._refuse_if_all_held(i)
        self._monitor.condition.wait()

    def at_hand(self, tile: Tile) -> bool:
        """Whether for_update would return at once, and use no mirror."""
        if self._homes and tile.unit in self._homes:
            return False
        if not self.streamed(tile.unit):
            return all(copy.done() for copy in self._in_flight.of(self._memory[tile.unit]))
        return self._slot(tile).changeable(*self._bytes(tile))

    def for_update(self, tile: Tile, *, read: bool = True) -> Tensor:
        """(tile.numel,) to change in place. Waits for the tile's read, its last write and its last copy to the device.

        `read=False`: every element will be written, so that a tile from a discrete device need not be copied here.
        """
        if self._homes and tile.unit in self._homes:
            return self._homes.borrow(tile, read=read)
        dtype, (start, stop) = self._plan.units[tile.unit].spec.dtype, self._bytes(tile)
        if not self.streamed(tile.unit):
            self._in_flight.wait(self._in_flight.of(self._memory[tile.unit]))
            return self._memory[tile.unit].view(dtype, tile.numel, start)
        slot = self._slot(tile)
        slot.wait_changeable(start, stop)
        return slot.memory.view(dtype, tile.numel, start)

    def _bytes(self, tile: Tile) -> tuple[int, int]:
        """The tile's byte range in its unit's memory or slot."""
        size = self._plan.units[tile.unit].spec.dtype.itemsize
        return tile.start * size, tile.stop * size

    def _slot(self, tile: Tile) -> Slot[Block]:
        """The slot of the tile's unit, which must have one."""
        slot = self._slots(tile.unit).find(tile.unit)
        assert slot is not None
        return slot

    def fetch(self, tile: Tile) -> None:
        """Begins to copy the tile's old values to the host, for a `for_update` soon, if its home is on a device."""
        if self._homes and tile.unit in self._homes:
            self._homes.fetch(tile)

    def changed(self, tile: Tile, number: int | None = None) -> None:
        """Moves the tile's new values to its tier. They come from update `number`; None: from the caller."""
        if self._homes and tile.unit in self._homes:
            self._homes.refresh(tile)
            return
        if tile in self._copied:
            self._copied[tile].changed = True
        if not self.streamed(tile.unit):
            return
        slot, dtype, (start, _) = self._slot(tile), self._plan.units[tile.unit].spec.dtype, self._bytes(tile)
        if tile not in self._stored[tile.unit]:
            home = self._memory[tile.unit].view(dtype, tile.numel, start)
            home.copy_(slot.memory.view(dtype, tile.numel, start))
        elif tile.unit in self._staying:
            slot.unsaved[tile] = partial(self._write, tile, slot, f" after update {number}" if number else "")
        else:
            self._write(tile, slot)

    def _write(self, tile: Tile, slot: Slot[Block], when: str = "") -> Stored | TwoPlaces:
        """Begins to store the tile from its unit's slot. Returns the place."""
        place, first, stop = self._stored[tile.unit][tile]
        slot.leaves(place.write(slot.memory.raw(first, stop), f"parameters of {tile}{when}"), first, stop)
        return place

    def restore(self, tile: Tile) -> None:
        """Copies the tile's values that an earlier process left on disk to the tile's home on a discrete device."""
        if self._homes and tile.unit in self._homes:
            self._homes.restore(tile)

    def end_update(self, i: int, *, wanted: bool = True) -> None:
        """Lets go of unit i's slot, which keeps the values for their next use if they are `wanted` soon."""
        if self._homes is not None:
            self._homes.give_back(i)
        with self._monitor.condition:
            slot = self._slots(i).find(i)
            if slot is not None:
                self._slots(i).keep(slot, UPDATED, due=self._slots(i).tick() if wanted else None)
            self._monitor.condition.notify_all()

    # -- attach, checkpoints ------------------------------------------------------------------------------------

    def in_memory(self) -> list[Tensor]:
        """(nbytes,) uint8 each: all parameters in host memory without another copy, in a fixed order. Called while
        nothing is in flight."""
        rows = zip(self._plan.units, self._memory, self._memory_numel, strict=True)
        return [memory.raw(0, numel * unit.spec.dtype.itemsize) for unit, memory, numel in rows if numel]

    def blocks(self, i: int) -> list[Block]:
        """Arena blocks with unit i's parameters in host memory, which have no copy elsewhere."""
        return [self._memory[i]] if self._memory_numel[i] else []

    def _read(self, i: int, slot: Slot[Block]) -> None:
        """Begins to read unit i into a slot that was just taken for it."""
        spec, numel = self._plan.units[i].spec, self._memory_numel[i]
        if numel:
            slot.memory.view(spec.dtype, numel).copy_(self._memory[i].view(spec.dtype, numel))
        for place, first, stop in self._stored[i].values():
            slot.fills(place.read(slot.memory.raw(first, stop), f"parameters of {spec.name}"))

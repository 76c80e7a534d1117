"""Keeps optimizer states by tier: as records in host memory, or stored and passed through slots.

Owns the records and their places. Not here: the arithmetic (in the UpdateStep).

[Note: what stays in slots]
Every step updates the same tiles in the same order, t0 to tn. If the tiles took turns in all slots, each tile would
lose its slot shortly before it is needed again, and every step would read all of them: evicting the least recently used
is the worst choice for a cycle. The best choice is to evict the tile that is needed last (Belady's MIN), which is the
one that was just updated. So the first tiles keep their slots from one step to the next, and the others pass through
the PASSING_SLOTS that are left, so that reads still run ahead. With a slot for each record, none is read.

With as few slots as PASSING_SLOTS none stays.

Where units are updated one by one in backward, the tiles of the model's first units stay, in half of the slots at
least. Their gradients come last and the next forward needs them first, so nothing would hide their reads. Through the
other slots the tiles that backward updates first are read, which forward hides.

A tile that stays is not written either, unless the store is durable: see [Note: written back].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from ..durable.ab_places import TwoPlaces, states_of
from ..layout.tile import Record, Tile
from ..memory.arena import Block
from ..memory.slots import Slot, resident_slots
from .store_context import Shared, StoredTiles


class StateStore:
    """One rank's optimizer states. Only the update thread calls it, except while that thread is idle."""

    def __init__(self, shared: Shared) -> None:
        plan, generations = shared.plan, shared.generations
        self._resident: set[Tile] = set()
        self._soon: deque[Tile] = deque()  # whose reads begin as slots come free
        self._records: dict[Tile, Record] = {}
        self._memory: dict[Tile, Block] = {}
        self._copied: dict[Tile, TwoPlaces] = {}  # the places to which a commit copies records in memory
        self.stored = StoredTiles("states", shared, plan.state_slots, plan.state_slot_bytes)
        self.slots = self.stored.slots
        self._of_unit: dict[int, list[Tile]] = {}  # those that are stored
        for unit in plan.units:
            for tile, record, tier in zip(unit.tiles, unit.records, unit.state_tiers, strict=True):
                if record is None:
                    continue
                self._records[tile] = record
                name = states_of(tile)
                if not tier.stored:
                    self._memory[tile] = block = shared.arena.take(record.nbytes)
                    if generations is not None:
                        self._copied[tile] = generations.own(name, record.nbytes, partial(block.raw, 0, record.nbytes))
                else:
                    own = partial(generations.own, name) if generations is not None else shared.stores[tier].own
                    self.stored[tile] = own(record.nbytes)
                    self._of_unit.setdefault(tile.unit, []).append(tile)

        stay = max(resident_slots(len(self.slots), len(self.stored)), len(self.slots) // 2)
        self._first = set(list(self.stored)[:stay])  # that stay where units are updated one by one

    def begin_read(self, tile: Tile, *, wait: bool) -> Slot[Block] | None:
        """A held slot into which the record is being read, or has been. None: `wait` is off and no slot is free."""
        return self.stored.begin_read(tile, self._records[tile].nbytes, wait=wait)

    def read_early(self, units: Iterable[int]) -> None:
        """Reads the states of `units`, which will be updated in this order, as slots come free. Needs no norm.

        Reads of other units that have not begun will not begin.
        """
        tiles = (tile for unit in units for tile in self._of_unit.get(unit, ()))
        self._soon = deque(tile for tile in tiles if self.slots.find(tile) is None)
        self.read_on()

    def read_on(self) -> bool:
        """Begins the reads for which there are slots now, without waiting. Returns whether there were any."""
        began = False
        while self._soon and not self.stored[self._soon[0]].writing():
            slot = self.begin_read(self._soon[0], wait=False)
            if slot is None:
                break
            self.keep(slot)
            self._soon.popleft()
            began = True
        return began

    def keep(self, slot: Slot[Block]) -> None:
        """Lets go of the slot; its record stays in it, as if read ahead."""
        self.slots.keep(slot, due=self.slots.tick())

    def in_memory(self) -> list[Tensor]:
        """(nbytes,) uint8 each: all records in host memory, in a fixed order."""
        return [block.raw(0, self._records[tile].nbytes) for tile, block in self._memory.items()]

    def blocks(self, i: int) -> list[Block]:
        """Arena blocks with unit i's records in host memory, which have no copy elsewhere."""
        return [block for tile, block in self._memory.items() if tile.unit == i]

    def expect(self, tiles: Sequence[Tile]) -> None:
        """Called when an update of `tiles` in this order begins. Frees the slots of other tiles: the next updates will
        be alike. If all tiles are of one unit, updates of other units will follow, and no slots are freed.
        """
        stored = [tile for tile in tiles if tile in self.stored]
        if len({tile.unit for tile in tiles}) == 1:
            self._stay(self._first)
            self._soon = deque(tile for tile in self._soon if tile.unit != tiles[0].unit)
            return
        self._soon.clear()
        soonest = stored[: len(self.slots)]
        most = resident_slots(len(self.slots), len(self.stored))
        self._stay(set(stored[:most] if most < len(self.stored) else self.stored))
        self.slots.forget(but=soonest)

    def views(self, tile: Tile, slot: Slot[Block] | None) -> Mapping[str, Tensor]:
        """The record's fields, in `slot` for a stored tile. Empty for an optimizer without states."""
        block = self._memory.get(tile) if slot is None else slot.memory
        return {} if block is None else self._records[tile].views(block)

    def _stay(self, tiles: set[Tile]) -> None:
        """Lets these tiles stay from now on. Begins to store those that stayed until now, to free their slots."""
        self._resident = tiles
        for slots, slot in self.slots.unsaved():
            if slot.key not in tiles:
                for write in slot.unsaved.values():
                    write()
                slots.saved(slot)  # once it is stored, another tile may take the slot

    def changed(self, tile: Tile, slot: Slot[Block] | None, number: int | None = None) -> None:
        """The record has the values of update `number`; None: the caller's values.

        A record in a slot is written back: later if it stays for the next update, else at once, and then its slot is
        free once it is written.
        """
        if slot is None:
            if tile in self._copied:
                self._copied[tile].changed = True
            return
        stays, when = number is not None and tile in self._resident, f" after update {number}"
        self.stored.changed(tile, slot, self._records[tile].nbytes, stays=stays, when=when)
        if tile in self._resident:
            self.keep(slot)
        else:
            self.slots.give(slot)

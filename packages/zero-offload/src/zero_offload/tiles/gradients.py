"""Keeps gradients by tier until the update: each waits for the disk in a slot, and later ones are added in fp32.

Owns the memory, the extents and the chunk sums. Not here: the arithmetic (in the UpdateStep).

[Note: two forms]
The first gradient after an update is kept as it came, in the reduce dtype; from the second on the sum is fp32, in the
same memory of 4 bytes an element. So without accumulation a 16-bit gradient touches (or swaps) 2 bytes an element.
Where the plan excludes accumulation, only these 2 are reserved, and a second gradient is refused:

    none ──first──> bf16 |g g g g|. . . .|  ──second──> fp32 |G   G   G   G   |  ──update, discard──> none

While a gradient is being added its unit is PARTIAL; where that ends early (Ctrl-C), it stays so until it is discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..core import CHUNK_NUMEL, fits
from ..errors import OffloadError
from ..layout.footprint import GRADIENT_BYTES
from ..layout.tile import Tile, round_up
from ..memory.arena import Block
from ..memory.slots import Slot, resident_slots
from .store_context import Shared, StoredTiles

PARTIAL = "partial"
Part = Callable[[int, int], Tensor]  # (start, stop) of a shard -> its gradient there, on the CPU, until the next call
_Hand = dict[Tile, Slot[Block]]  # slots that one call holds


class GradientStore:
    """One rank's gradient shards, (shard_numel,) each. One thread adds, the update thread reads those it took.

    Units that are whole on a discrete device have no gradient here. On the CPU the training thread adds. With a
    discrete device the thread of `device_link` adds, and the training thread makes no call meanwhile. The update thread
    never works on the same unit, because a new gradient of unit i comes after unit i's update.
    """

    def __init__(self, shared: Shared) -> None:
        self._plan, self._step, self._monitor, self._order = shared.plan, shared.step, shared.monitor, shared.order
        plan, self.dtype = shared.plan, shared.context.reduce_dtype
        self.stored = StoredTiles("gradient", shared, plan.gradient_slots, plan.gradient_slot_bytes)
        self.slots = self.stored.slots
        # By unit, the dtype in which its gradient is kept; None: it has none; or PARTIAL. See [Note: two forms].
        self._held: list[torch.dtype | str | None] = [None] * len(plan.units)
        self._expected = [False] * len(plan.units)  # a gradient was checked, and may not be added yet
        self.kept: list[list[Tile]] = []  # per unit, its tiles that have a gradient: in memory first, then stored ones
        self._memory: list[Any] = []  # a Block; None for a unit without trained elements
        self._memory_numel: list[int] = []
        self._sums: list[dict[int, float]] = []  # per unit: a chunk's first element -> its sum of squares
        for unit in plan.units:
            numel = unit.memory_numel(unit.gradient_tiers) if unit.trainable else 0
            self._memory.append(shared.arena.take(numel * plan.gradient_itemsize) if unit.trainable else None)
            self._memory_numel.append(numel)
            self._sums.append({})
            self.kept.append([])
            for tile, tier in zip(unit.tiles, unit.gradient_tiers, strict=True):
                if tile.trainable and tier.stored:
                    nbytes = round_up(tile.numel * plan.gradient_itemsize, plan.alignment)
                    self.stored[tile] = shared.stores[tier].own(nbytes)
                if tile.trainable or not tier.stored:
                    self.kept[-1].append(tile)

    # -- the thread that adds ------------------------------------------------------------------------------------

    def begun(self) -> bool:
        """Whether a gradient was checked since the last update, or since all were discarded."""
        return any(self._expected)

    def lend(self, i: int) -> Tensor | None:
        """The memory of unit i's first gradient, (shard_numel,) in the reduce dtype; None if there is none to lend."""
        numel, memory = self._plan.units[i].spec.numel, self._memory[i]
        if memory is None or self._held[i] is not None or self._memory_numel[i] < numel or not numel:
            return None
        return memory.view(self.dtype, numel)

    def check(self, i: int, gradient: Tensor) -> None:
        """Checks a gradient before it is accepted. Raises ValueError unless it is (shard_numel,) in the reduce dtype.

        Raises OffloadError where it would be added to another gradient and there is no memory for a sum.
        """
        unit = self._plan.units[i]
        if gradient.numel() != unit.spec.numel or gradient.dtype != self.dtype:
            raise ValueError(
                f"gradient of unit {unit.spec.name}: {gradient.numel()} elements of {gradient.dtype}, "
                f"expected {unit.spec.numel} of {self.dtype}"
            )
        if self._expected[i] and self._plan.gradient_itemsize < GRADIENT_BYTES:
            raise OffloadError(
                f"a second gradient of unit {unit.spec.name} before step(): accumulate=1 leaves each element only "
                f"{self._plan.gradient_itemsize} bytes, and a sum needs {GRADIENT_BYTES}; set accumulate= of "
                "zero_offload.plan() or TieredStore() to the number of micro-batches. With plan(no_sync=True), "
                "run all but the last one inside zero_core.no_sync(model) instead. Or call zero_grad() between the two"
            )
        self._expected[i] = unit.trainable

    def accept(self, i: int, gradient: Tensor) -> None:
        """Adds a gradient (shard_numel,) on the CPU in the reduce dtype."""
        self.accept_pieces(i, lambda start, stop: gradient[start:stop])

    def accept_pieces(self, i: int, part: Part) -> None:
        """Adds a gradient tile by tile: `part` is called for each tile of kept[i], in order."""
        if not self._plan.units[i].trainable:
            return
        held = self._whole(i)
        self._held[i] = PARTIAL
        memory = self._memory[i]
        if memory is not None and held not in (None, torch.float32):
            memory.widen(self.dtype, self._memory_numel[i])
        with self._hand() as hand:
            for tile, following in zip(self.kept[i], [*self.kept[i][1:], None], strict=True):
                self._add(hand, tile, part, held, following)
        self._held[i] = self.dtype if held is None else torch.float32

    def discard(self) -> None:
        with self._monitor.condition:
            for slots, slot in self.slots.unsaved():
                if self._held[slot.key.unit] is not None:  # else an update has it
                    slots.saved(slot)
        self._held = [None] * len(self._held)
        self._expected = [False] * len(self._held)
        self.slots.forget()
        for sums in self._sums:
            sums.clear()

    def discard_gradient(self, i: int, start: int, stop: int) -> None:
        """Sets elements [start, stop) of unit i's gradient to zero, on any tier."""
        if self._whole(i) is not None:
            self._visit(i, start, stop, lambda part, at: part.zero_(), changes=True)

    def read_gradient(self, i: int, start: int, stop: int) -> Tensor:
        """(stop - start,) fp32 on the CPU: a copy of these elements of unit i's gradient."""
        values = torch.zeros(stop - start, dtype=torch.float32, device="cpu")
        self._visit(i, start, stop, lambda part, at: values[at : at + part.numel()].copy_(part), changes=False)
        return values

    def write_gradient(self, i: int, start: int, values: Tensor) -> None:
        """Overwrites elements of unit i's gradient with fp32 `values`, which `check_fits` has accepted."""
        values = values.to("cpu")
        if self._whole(i) not in (None, torch.float32) and not fits(values, self.dtype):
            self.accept_pieces(i, lambda a, b: torch.full((b - a,), -0.0, dtype=self.dtype, device="cpu"))  # fp32 now
        stop = start + values.numel()
        self._visit(i, start, stop, lambda part, at: part.copy_(values[at : at + part.numel()]), changes=True)

    def check_fits(self, i: int, values: Tensor) -> None:
        """Raises OffloadError if fp32 `values` would have to be rounded, because there is no memory for fp32."""
        if self._plan.gradient_itemsize < GRADIENT_BYTES and not fits(values, self.dtype):
            raise OffloadError(
                f"new values for the gradient of {self._plan.units[i].spec.name} would be rounded to {self.dtype}, and "
                f"none was written: with accumulate=1 the store has {self._plan.gradient_itemsize} bytes an element "
                f"for gradients. Set accumulate=2 in zero_offload.plan or TieredStore, for {GRADIENT_BYTES} bytes. Or "
                f"round the values first: values.to({self.dtype})"
            )

    def _visit(self, i: int, start: int, stop: int, visit: Callable[[Tensor, int], object], *, changes: bool) -> None:
        """Calls visit(part, at) for the part of each tile in [start, stop), which begins `at` elements behind `start`.

        Raises OffloadError if no gradient is kept.
        """
        held = self._whole(i)
        if held is None and start < stop:
            raise OffloadError(
                f"unit {self._plan.units[i].spec.name} has received no gradient since the last update: run a backward "
                "before reading or writing its gradient"
            )
        dtype = held or torch.float32
        for tile in self.kept[i]:
            low, high = max(start, tile.start), min(stop, tile.stop)
            if low < high:
                with self._hand() as hand:
                    if tile in self.stored:
                        kept = self._there(hand, tile, dtype).view(dtype, tile.numel)
                    else:
                        kept = self.in_memory(tile, dtype)
                    visit(kept[low - tile.start : high - tile.start], low - start)
                    if changes:
                        self._changed(hand, tile, kept)
                    elif tile in hand:
                        self.keep(tile, hand.pop(tile))

    def norm_squared(self) -> float:
        """The sum of the chunk sums of all units, in order."""
        total = 0.0
        for i, sums in enumerate(self._sums):
            self._whole(i)
            for first in sorted(sums):
                total += sums[first]
        return total

    def take(self, i: int) -> torch.dtype | None:
        """Hands unit i's gradient to an update, in the dtype that is returned; None: there is none.

        From here on the unit has no gradient, and no sums.
        """
        held, self._held[i] = self._whole(i), None
        self._expected[i] = False
        self._sums[i].clear()
        return held

    def _add(self, hand: _Hand, tile: Tile, part: Part, held: torch.dtype | None, following: Tile | None) -> None:
        """Adds a tile to the values kept in the dtype `held`. A tile in memory is fp32 by now, unless held is None."""
        dtype = self.dtype if held is None else torch.float32
        if tile not in self.stored:
            kept = self.in_memory(tile, dtype)
        else:
            block = self._there(hand, tile, held, following)
            if held not in (None, dtype):
                block.widen(self.dtype, tile.numel)
            kept = block.view(dtype, tile.numel)
        gradient = part(tile.start, tile.stop)
        if held is not None:
            self._step.accumulate(kept, gradient)
        elif kept.data_ptr() != gradient.data_ptr():
            kept.copy_(gradient)
        self._changed(hand, tile, kept)

    def _changed(self, hand: _Hand, tile: Tile, kept: Tensor) -> None:
        """Sums the squares of the tile's new values, and begins to write them if the tile is stored."""
        sums = self._step.chunk_norms_squared(kept)
        self._sums[tile.unit].update(zip(count(tile.start, CHUNK_NUMEL), sums, strict=False))
        if tile in self.stored:
            slot, nbytes = hand[tile], self._nbytes(tile, kept.dtype)
            self.stored.changed(tile, slot, nbytes, stays=bool(slot.unsaved) or self._room())
            self.keep(tile, hand.pop(tile))  # for the update, until another tile needs the slot

    def _whole(self, i: int) -> torch.dtype | None:
        """The dtype of unit i's gradient. Raises OffloadError where only a part of a gradient was added."""
        held = self._held[i]
        if isinstance(held, str):
            raise OffloadError(
                f"adding a gradient of unit {self._plan.units[i].spec.name} was interrupted, so its sum is incomplete; "
                "call optimizer.zero_grad() and repeat the step's backward passes"
            )
        return held

    @contextmanager
    def _hand(self) -> Iterator[_Hand]:
        """Slots that one call holds. At its end they are let go, and only unsaved values stay in them."""
        hand: _Hand = {}
        try:
            yield hand
        finally:
            for slot in hand.values():
                self.slots.keep(slot) if slot.unsaved else self.slots.give(slot)

    def _room(self) -> bool:
        """Whether one more tile may stay in its slot until the update."""
        most = resident_slots(len(self.slots), len(self.stored))
        return len(self.slots.unsaved()) < most

    def _there(self, hand: _Hand, tile: Tile, dtype: torch.dtype | None, following: Tile | None = None) -> Block:
        """A slot with the tile's values of this dtype; None: it need not have any, because they are replaced.

        Begins to read the `following` tile too, if a slot is free without waiting.
        """
        if tile not in hand:
            slot: Any = self.stored.take(tile) if dtype is None else self.begin_read(tile, dtype, wait=True, steal=True)
            hand[tile] = slot
        if following is not None and dtype is not None:
            ahead = self.begin_read(following, dtype, wait=False, steal=True)
            if ahead is not None:
                hand[following] = ahead
        with self._monitor.exposed(str(tile), unless=hand[tile].changeable()):
            hand[tile].wait_changeable()
        return hand[tile].memory

    # -- both threads: transfers of a tile ----------------------------------------------------------------------

    def in_memory(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """The kept gradient (tile.numel,) of a tile that is not stored."""
        return self._memory[tile.unit].view(dtype, tile.numel, tile.start * dtype.itemsize)

    def begin_read(self, tile: Tile, dtype: torch.dtype, *, wait: bool, steal: bool = False) -> Slot[Block] | None:
        """As `StoredTiles.begin_read`."""
        return self.stored.begin_read(tile, self._nbytes(tile, dtype), wait=wait, steal=steal)

    def _nbytes(self, tile: Tile, dtype: torch.dtype) -> int:
        return round_up(tile.numel * dtype.itemsize, self._plan.alignment)

    def keep(self, tile: Tile, slot: Slot[Block]) -> None:
        """Lets go of a slot whose values the update will use."""
        self.slots.keep(slot, due=(self._order.position(tile.unit), tile.index))

    def kept_in_memory(self) -> list[Tensor]:
        """(nbytes,) uint8 each: every gradient in host memory that waits for a step, in a fixed order.

        Raises OffloadError where only a part of one was added.
        """
        found = []
        for i, memory in enumerate(self._memory):
            held, numel = self._whole(i), self._memory_numel[i]
            if memory is not None and numel and held is not None:
                found.append(memory.raw(0, numel * held.itemsize))
        return found

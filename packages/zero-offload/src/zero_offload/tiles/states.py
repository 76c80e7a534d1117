"""Optimizer states by tier: records in host memory, or extents that pass through slots.

Owns the records, the extents and what was read ahead. The arithmetic is the UpdateStep's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..arena import Arena, Block
from ..monitor import Monitor
from ..protocols import Extent
from ..tier import Tier, Transfer, Transfers
from .footprint import StorePlan
from .slots import SlotPool
from .tile import Record, Tile

__all__ = ["StateStore"]


class StateStore:
    """The update thread's, except while it is idle."""

    def __init__(self, plan: StorePlan, arena: Arena, nvme: Transfers | None, monitor: Monitor) -> None:
        self._nvme = nvme
        self._records: dict[Tile, Record] = {}
        self._memory: dict[Tile, Block] = {}
        self._extents: dict[Tile, Extent] = {}
        self._writes: dict[Tile, Transfer] = {}
        self._early: dict[Tile, tuple[Block, Transfer]] = {}
        for unit in plan.units:
            for tile, record, tier in zip(unit.tiles, unit.records, unit.state_tiers, strict=True):
                if record is None:
                    continue
                self._records[tile] = record
                if tier is Tier.NVME and nvme is not None:
                    self._extents[tile] = nvme.own(record.nbytes)
                else:
                    self._memory[tile] = arena.take(record.nbytes)
        self.pool = SlotPool([arena.take(plan.state_slot_bytes) for _ in range(plan.state_slots)], monitor)

    def swapped(self, tile: Tile) -> bool:
        return tile in self._extents

    def begin_read(self, tile: Tile, *, wait: bool) -> tuple[Block, Transfer] | None:
        """A slot with the tile's record under way, or there already. None: no slot is free and `wait` is off."""
        early = self._early.pop(tile, None)
        if early is not None:
            return early
        block = self.pool.try_take()
        if block is None and not wait:
            return None
        if block is None:
            if self._early:  # no slot may come back otherwise; the newest is the farthest from its use
                self._drop(next(reversed(self._early)))
            block = self.pool.take()
        assert self._nvme is not None
        try:
            if tile in self._writes:
                self._writes[tile].wait()
                del self._writes[tile]
            source = block.raw(0, self._records[tile].nbytes)
            return block, self._nvme.read(self._extents[tile], source, f"states of {tile}")
        except BaseException:
            self.pool.give(block)
            raise

    def read_early(self, tiles: Sequence[Tile]) -> None:
        """Read the first of `tiles`, as many as there are free slots; they do not depend on the gradient norm."""
        for tile in tiles:
            if tile not in self._early and self.swapped(tile):
                loaded = self.begin_read(tile, wait=False)
                if loaded is None:
                    return
                self._early[tile] = loaded

    def keep(self, tile: Tile, loaded: tuple[Block, Transfer]) -> None:
        """What was read stays in its slot, as if read ahead."""
        self._early[tile] = loaded

    def drop_early(self, keep: Sequence[Tile] = ()) -> None:
        """Free the slots of what was read ahead, `keep` apart: the order was not the one expected, or values change."""
        kept = set(keep)
        for tile in [tile for tile in self._early if tile not in kept]:
            self._drop(tile)

    def _drop(self, tile: Tile) -> None:
        block, transfer = self._early.pop(tile)
        self.pool.give(block, after=transfer)

    def views(self, tile: Tile, block: Block | None) -> Mapping[str, Tensor]:
        """The record's fields, in `block` for a swapped tile. Empty for an optimizer without states."""
        block = self._memory.get(tile) if block is None else block
        return {} if block is None else self._records[tile].views(block)

    def swap_out(self, tile: Tile, block: Block) -> None:
        """Begin to write the record back; the slot is free when that is done."""
        assert self._nvme is not None
        source = block.raw(0, self._records[tile].nbytes)
        transfer = self._nvme.write(self._extents[tile], source, f"states of {tile}")
        self._writes[tile] = transfer
        self.pool.give(block, after=transfer)

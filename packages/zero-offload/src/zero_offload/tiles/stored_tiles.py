"""Tiles of one kind that are kept on a slower tier and pass through slots. What a tile means is its owner's."""

from __future__ import annotations

from functools import partial

from ..arena import Arena, Block
from ..monitor import Monitor
from ..slots import Slot, Slots
from ..transfers import InFlight, Stored
from .tile import Tile
from .two_places import TwoPlaces

__all__ = ["StoredTiles"]


class StoredTiles(dict[Tile, Stored | TwoPlaces]):
    """Where each tile is kept. `slots`: `count` of `nbytes` in the arena. `what`: the kind, for errors.

    writes_back: a change of a tile that stays in its slot is not written, see `write_back`.
    """

    def __init__(
        self,
        what: str,
        arena: Arena,
        count: int,
        nbytes: int,
        monitor: Monitor,
        in_flight: InFlight,
        writes_back: bool,
    ) -> None:
        super().__init__()
        self._what, self._writes_back = what, writes_back
        blocks = [arena.take(nbytes) for _ in range(count)]
        self.slots: Slots[Block] = Slots(blocks, in_flight, monitor.condition, blocked=monitor.wait_for_change)

    def begin_read(self, tile: Tile, nbytes: int, *, wait: bool, steal: bool = False) -> Slot[Block] | None:
        """A held slot with the tile under way, or there already. None: `wait` is off and no slot is free.

        `steal`: a slot with what is wanted later is free too. Whoever waits gets one of these, if there is no other.
        """
        slot = self.slots.hold(tile)
        if slot is not None:
            return slot
        self[tile].drain()  # not in `fill`, which runs under the condition

        def fill(slot: Slot[Block]) -> None:
            slot.fills(self[tile].read(slot.memory.raw(0, nbytes), f"{self._what} of {tile}"))

        slot = self.slots.try_take(tile, fill=fill, steal=steal)
        return self.slots.take(tile, fill=fill) if slot is None and wait else slot

    def changed(self, tile: Tile, slot: Slot[Block], nbytes: int, *, stays: bool, when: str = "") -> None:
        """The slot has new values of the tile, which its holder has yet to let go of: begin to write them, unless it
        stays there for its next use. when: they were changed, for the error of a later write."""
        if stays and self._writes_back:
            slot.unsaved[tile] = partial(self._write, tile, slot, nbytes, when)
        else:
            self._write(tile, slot, nbytes)

    def _write(self, tile: Tile, slot: Slot[Block], nbytes: int, when: str = "") -> Stored | TwoPlaces:
        slot.leaves(self[tile].write(slot.memory.raw(0, nbytes), f"{self._what} of {tile}{when}"))
        return self[tile]

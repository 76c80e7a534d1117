"""Holds the objects that all parts of one attached store share, and moves tiles between slower tiers and slots.

Predicts the order of the coming updates too. Not here: which values stay in their slots, and the layout of tiles (in
states.py, gradients.py and parameters.py).

[Note: written back]
A tile that stays in its slot until it is needed again is not written after each change: the slot is `unsaved`, so that
nothing evicts it. Its values go to the tier when another tile is to stay in its place, or before the memory goes
(sleep, a second stage). A process that is killed leaves older values on the tier than its last step's, and so only
stores that are not durable write back: nobody reads those values again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..core import StoreContext
from ..durable.ab_places import TwoPlaces
from ..durable.generations import Generations
from ..layout.footprint import StorePlan
from ..layout.tile import Tile
from ..memory.arena import Arena, Block
from ..memory.slots import Slot, Slots
from ..memory.transfers import InFlight, Stored, Stores
from ..monitor import Monitor
from ..protocols import UpdateStep
from ..streams import Streams


class Order:
    """`units`: the units of the coming updates, soonest first, as in the last ones. Empty until the first update."""

    def __init__(self) -> None:
        self.units: list[int] = []

    def learn(self, updated: Sequence[int], of: int) -> None:
        """Called when an update of the units `updated`, out of `of` units, begins.

        Predicts the same order again; where units are updated one by one, the units that followed this one last time.
        """
        if len(updated) != 1 or of == 1:
            self.units = list(updated)
        elif updated[0] in self.units:
            at = self.units.index(updated[0])
            self.units = [*self.units[at + 1 :], *self.units[: at + 1]]
        else:
            self.units = [*self.units, updated[0]]

    def position(self, unit: int) -> int:
        """The unit's position among the coming updates; its position in the model before any update."""
        return self.units.index(unit) if unit in self.units else unit


@dataclass(frozen=True)
class Shared:
    """The plan of one store, its memory, its tiers and the monitor of its threads.

    generations: None: it is not durable. streams: of a discrete device; None: the compute device is the CPU. there:
    updates tiles that visit that device and are not uncut; None: there are none. pools: all slots through which values
    of stored tiers pass.
    """

    plan: StorePlan
    context: StoreContext
    step: UpdateStep
    arena: Arena
    stores: Stores
    monitor: Monitor
    generations: Generations | None = None
    streams: Streams | None = None
    there: UpdateStep | None = None
    order: Order = field(default_factory=Order)
    pools: list[Slots[Block]] = field(default_factory=list)

    @property
    def in_flight(self) -> InFlight:
        """The record of requests in flight."""
        return self.stores.in_flight

    def blocks(self, count: int, nbytes: int) -> list[Block]:
        """`count` equal blocks of the arena."""
        return [self.arena.take(nbytes) for _ in range(count)]

    def pool(self, count: int, nbytes: int, *, blocked: Callable[[], object] | None = None) -> Slots[Block]:
        """`count` equal slots in the arena, for both threads. blocked: as for `Slots`."""
        self.pools.append(Slots(self.blocks(count, nbytes), self.in_flight, self.monitor.condition, blocked=blocked))
        return self.pools[-1]


def save(unsaved: Iterable[tuple[Slots[Block], Slot[Block]]]) -> None:
    """Returns when the values of these slots are stored. The caller ensures that nobody uses the slots meanwhile.

    Raises the first error of a write. Slots whose write failed stay unsaved, so that another call can try again.
    """
    failure: Exception | None = None
    begun: list[tuple[Slots[Block], Slot[Block], list[Hashable]]] = []
    for slots, slot in unsaved:
        begun.append((slots, slot, []))
        try:
            for write in slot.unsaved.values():
                begun[-1][2].append(write())
        except Exception as error:
            failure = failure or error
    for slots, slot, places in begun:
        try:
            slot.wait_changeable()
            if len(places) == len(slot.unsaved):
                slots.saved(slot)
        except Exception as error:  # forgotten, so that the next call can write the same bytes
            failure = failure or error
            for place in places:
                slot.in_flight.forget(place)
            slot.in_flight.forget(slot, writes=False)
    if failure is not None:
        raise failure


class StoredTiles(dict[Tile, Stored | TwoPlaces]):
    """Maps each tile to its place on the tier. `slots`: `count` of `nbytes` in the arena. `what`: the kind, for errors.

    Unless the store is durable, a change of a tile that stays in its slot is not written: see [Note: written back].
    """

    def __init__(self, what: str, shared: Shared, count: int, nbytes: int) -> None:
        super().__init__()
        self._what, self._writes_back, self._monitor = what, shared.generations is None, shared.monitor
        self.slots = shared.pool(count, nbytes, blocked=self._monitor.wait_for_change)

    def begin_read(self, tile: Tile, nbytes: int, *, wait: bool, steal: bool = False) -> Slot[Block] | None:
        """A held slot into which the tile is being read, or has been. None: `wait` is off and no slot is free.

        `steal`: a slot whose tile is wanted later counts as free. With `wait`, such a slot is taken if there is no
        other.
        """
        if self.slots.find(tile) is None:
            self[tile].drain()  # not in `fill`, which runs under the condition

        def fill(slot: Slot[Block]) -> None:
            slot.fills(self[tile].read(slot.memory.raw(0, nbytes), f"{self._what} of {tile}"))

        return self.take(tile, fill, wait=wait, steal=steal)

    def take(
        self, tile: Tile, fill: Callable[[Slot[Block]], None] | None = None, *, wait: bool = True, steal: bool = True
    ) -> Slot[Block] | None:
        """The tile's slot, or another one for it, held. None: as `begin_read`."""
        slot = self.slots.try_take(tile, fill=fill, steal=steal)
        if slot is None and wait:
            with self._monitor.exposed(str(tile)):
                slot = self.slots.take(tile, fill=fill)
        return slot

    def changed(self, tile: Tile, slot: Slot[Block], nbytes: int, *, stays: bool, when: str = "") -> None:
        """The slot, still held, has new values of the tile: begins to write them unless the tile `stays` in the slot.

        when: the update that changed them, for the error of a later write.
        """
        if stays and self._writes_back:
            slot.unsaved[tile] = partial(self._write, tile, slot, nbytes, when)
        else:
            self._write(tile, slot, nbytes)

    def _write(self, tile: Tile, slot: Slot[Block], nbytes: int, when: str = "") -> Stored | TwoPlaces:
        slot.leaves(self[tile].write(slot.memory.raw(0, nbytes), f"{self._what} of {tile}{when}"))
        return self[tile]

"""Holds the objects that all parts of one attached store share, and predicts the order of the coming updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core import StoreContext
from ..durable.generations import Generations
from ..layout.footprint import StorePlan
from ..memory.arena import Arena, Block
from ..memory.transfers import InFlight, Stores
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

    generations: None: it is not durable. streams: of a discrete device; None: the compute device is the CPU.
    """

    plan: StorePlan
    context: StoreContext
    step: UpdateStep
    arena: Arena
    stores: Stores
    monitor: Monitor
    generations: Generations | None = None
    streams: Streams | None = None
    order: Order = field(default_factory=Order)

    @property
    def in_flight(self) -> InFlight:
        """The record of requests in flight."""
        return self.stores.in_flight

    def blocks(self, count: int, nbytes: int) -> list[Block]:
        """`count` equal blocks of the arena."""
        return [self.arena.take(nbytes) for _ in range(count)]

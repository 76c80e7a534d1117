"""Holds the objects that all parts of one attached store share."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core import StoreContext
from ..durable.generations import Generations
from ..layout.footprint import StorePlan
from ..memory.arena import Arena, Block
from ..memory.transfers import InFlight, Stores
from ..monitor import Monitor
from ..protocols import UpdateStep
from ..streams import Streams
from .update_order import Order


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

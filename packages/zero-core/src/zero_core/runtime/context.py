"""Holds the objects that all units of one sharded model share."""

from __future__ import annotations

from dataclasses import dataclass

from ..comm.ranks import Ranks
from ..pool import Pool
from ..store import Observer, ShardStore

__all__ = ["UnitContext"]


@dataclass(frozen=True)
class UnitContext:
    """The ranks, the store and the buffers of one sharded model, and the observer of its transfers."""

    ranks: Ranks
    store: ShardStore
    pool: Pool
    observer: Observer
    updates_later: bool = False  # on any rank, a unit's parameters may have to be waited for after a step

    @property
    def swapping(self) -> ShardStore | None:
        """The store, if it copies into memory that it is given. It knows once it is attached."""
        return self.store if self.store.swaps_in else None

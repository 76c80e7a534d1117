"""What all units of one sharded model share. Owns nothing that they have each on their own."""

from __future__ import annotations

from dataclasses import dataclass

from ..comm.ranks import Ranks
from ..pool import Pool
from ..store import Observer, ShardStore

__all__ = ["UnitContext"]


@dataclass(frozen=True)
class UnitContext:
    """Between whom, out of what and into what memory is moved, and who is told."""

    ranks: Ranks
    store: ShardStore
    pool: Pool
    observer: Observer
    updates_later: bool = False  # on any rank, a unit's parameters may have to be waited for after a step

    @property
    def swapping(self) -> ShardStore | None:
        """The store, if it copies into memory that it is given. It knows once it is attached."""
        return self.store if self.store.swaps_in else None

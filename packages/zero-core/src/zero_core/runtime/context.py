"""What all units of one sharded model share. Owns nothing that they have each on their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..comm.ranks import Ranks
from ..pool import Pool
from ..store import LendsMasters, Observer, ShardStore, SwapsIn

__all__ = ["UnitContext"]


@dataclass(frozen=True)
class UnitContext:
    """Between whom, out of what and into what memory is moved, and who is told."""

    ranks: Ranks
    store: ShardStore
    pool: Pool
    observer: Observer
    updates_later: bool = False  # on any rank, a unit's parameters may have to be waited for after a step

    @cached_property
    def _swapping(self) -> SwapsIn | None:
        return self.store if isinstance(self.store, SwapsIn) else None

    @property
    def swapping(self) -> SwapsIn | None:
        """The store, if it copies into memory that it is given. It knows once it is attached."""
        return self._swapping if self._swapping is not None and self._swapping.swaps_in else None

    @cached_property
    def lends_masters(self) -> bool:
        """Whether the store lends masters, see `LendsMasters`."""
        return isinstance(self.store, LendsMasters) and self.store.lends_masters

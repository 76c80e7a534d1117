"""A unit's memory where it is the unit's own: nothing lent by the store, nothing from a pool.

So it is where the store copies into memory that it is given (`store.SwapsIn`), and where this torch cannot put memory
under a storage. Owns what is under way between the store, the ranks and that memory; whether a unit is unsharded is the
unit's to know.

[Note: a copy, then a gather into the same memory]
The storage of `flat` is given memory and freed again with `resize_`, so views of it stay views. On CUDA that is the
caching allocator's work, which hands the same blocks out again. Where the store swaps in, this rank's slice of `flat`
is what it copies into, and the gather's input:

    one shard     swap_in(whole) ..................................... wait
    several       swap_in(slice)   wait, all_gather(whole <- slice) .. wait
                  | begin          | proceed                           | finish

Which stream each of them is on is in [Note: streams].
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor

from ..comm.ranks import Ranks
from ..layout import UnitLayout
from ..store import Arrival, Observer, ShardStore, SwapsIn

__all__ = ["OwnMemory"]


class OwnMemory:
    """Fills the storage of `flat` (numel,), which has zero bytes between uses, with unit `index` of the store."""

    def __init__(
        self, flat: Tensor, index: int, layout: UnitLayout, *, ranks: Ranks, store: ShardStore, observer: Observer
    ) -> None:
        start, stop = layout.shard_range(ranks.shard.rank)
        self._flat, self._part = flat.data, flat.data[start:stop]  # their own version counters: autograd sees no write
        self._nbytes = flat.untyped_storage().nbytes()
        self._index, self._name = index, layout.name
        self._ranks, self._store, self._observer = ranks, store, observer
        self._swaps_in = False
        self._arrival: Arrival | None = None
        self._lent: Tensor | None = None  # the shard, where the store does not swap in and it is to be gathered
        self._work: Any = None

    def begin(self, *, swaps_in: bool) -> None:
        """Allocate, and let the store begin its copy. Where this raises, nothing is under way."""
        self._flat.untyped_storage().resize_(self._nbytes)
        self._swaps_in = swaps_in
        if swaps_in:
            try:
                self._arrival = cast(SwapsIn, self._store).swap_in(self._index, self._part)
            except BaseException:
                self.free()
                raise

    def proceed(self) -> None:
        """Several shards: wait for this rank's, begin the gather. After it raised: go on from there."""
        if self._work is not None:
            return
        with self._ranks.side.after_current():
            with self._observer.span("wait", self._name):
                if self._swaps_in:
                    self._await_arrival()
                elif self._lent is None:
                    self._lent = self._store.parameters(self._index)
            part = self._part if self._lent is None else self._lent
            with self._observer.span("gather", self._name):
                self._work = self._ranks.all_gather(self._flat, part, self._name, self._index)

    def finish(self) -> None:
        """The current stream goes on when the whole unit is there."""
        if self._ranks.shard.size > 1:
            self.proceed()
            with self._observer.span("gather", self._name):
                self._end_gather()
            return
        with self._observer.span("wait", self._name):
            if self._swaps_in:
                self._await_arrival()
            else:
                self._flat.copy_(self._store.parameters(self._index))
                self._store.release(self._index)

    def abandon(self) -> None:
        """The unit is not wanted: end what is under way, so that the memory can be freed."""
        if self._arrival is not None:
            self._arrival.drop()
            self._arrival = None
        self._end_gather()

    def free(self) -> None:
        self._flat.untyped_storage().resize_(0)

    def _await_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None

    def _end_gather(self) -> None:
        work, self._work = self._work, None
        try:
            self._ranks.wait(work, "all_gather", self._name)
        finally:
            if self._lent is not None:
                self._lent = None
                self._store.release(self._index)

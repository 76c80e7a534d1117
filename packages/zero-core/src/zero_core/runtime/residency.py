"""Where the memory of one unit's parameters is: sharded, on its way, or there. Knows neither visits nor gradients.

[Note: memory under existing views]
`flat` is a storage of zero bytes between uses, and the parameters are views of it. To unshard, memory is put *under*
the storage (`_swap_data_ptr_` with an alias of a pooled buffer, or of the very tensor that the store lent), so no view
is re-pointed, nothing is copied and no version counter moves. Tensors that autograd saved share the storage and follow.
Where the store copies into what it is given, and on a torch that cannot swap, the memory is the unit's own: own_memory.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..comm.ranks import Ranks
from ..layout import UnitLayout
from ..pool import Pool
from ..store import Observer, ShardStore
from .own_memory import OwnMemory

__all__ = ["Residency", "UnitMemory"]

_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # torch >= 2.12


class Residency(Enum):
    """Who pays: SHARDED nobody; the others the whole unit's bytes (on one shard, what the store lent, if it did)."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"


def _storage(flat: Tensor) -> Any:
    return flat.untyped_storage()  # Any: the swap is private


def _put_under(flat: Tensor, memory: Tensor) -> None:
    """Give `flat`, of zero bytes, the memory of a contiguous tensor of its size."""
    with torch.inference_mode(False):
        alias = torch._C._from_dlpack(torch._C._to_dlpack(memory.detach()))
        _storage(flat)._swap_data_ptr_(alias.untyped_storage())


def _take_away(flat: Tensor) -> None:
    if _CAN_SWAP:
        empty = torch.UntypedStorage(0, device=flat.device)
        _storage(flat)._swap_data_ptr_(empty)
    else:
        flat.untyped_storage().resize_(0)


class UnitMemory:
    """Flat storage of one dtype, (layout.numel,), that has memory only while it is wanted."""

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        *,
        dtype: torch.dtype,
        ranks: Ranks,
        store: ShardStore,
        pool: Pool,
        observer: Observer,
    ) -> None:
        self.index, self.layout, self.name, self.dtype = index, layout, layout.name, dtype
        self.ranks, self.store, self.pool, self.observer = ranks, store, pool, observer
        self.residency = Residency.SHARDED
        self._memory: Tensor | None = None
        self._pooled = False  # the memory is a buffer of the pool, not the store's
        self._work: Any = None
        self._owns = False  # the memory under `flat` is its own: neither the store's nor the pool's
        self.flat = torch.empty(layout.numel, dtype=dtype, device=ranks.device)
        self.views = [self.flat.data[s.offset : s.stop].view(s.shape) for s in layout.slots]
        self._own = OwnMemory(self.flat, index, layout, ranks=ranks, store=store, observer=observer)
        _take_away(self.flat)

    @property
    def nbytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize

    def prefetch(self) -> None:
        """Start to unshard. On one shard whose memory the store lends there is nothing to start but the store."""
        if self.residency is not Residency.SHARDED:
            return
        if self.ranks.shard.size == 1 and not self._swaps_in:
            self.store.prefetch(self.index)
            return
        if self._brings_memory:
            self._begin_own()
            if self.ranks.shard.size > 1:
                self._own.proceed()
            return
        with self.ranks.side.after_current(), self.observer.span("wait", self.name):
            shard = self.store.parameters(self.index)
        try:
            self._memory, self._pooled = self.pool.take(self.layout.numel, self.dtype), True
            with self.ranks.side.after_current(), self.observer.span("gather", self.name):
                self._work = self.ranks.all_gather(self._memory, shard, self.name, self.index)
        except BaseException:
            self._abandon_gather()
            raise
        self.residency = Residency.UNSHARDING

    def _end_gather(self) -> None:
        """Wait for the gather and give the shard back, also where the gather failed: then the unit is sharded."""
        try:
            self.ranks.wait(self._work, "all_gather", self.name)
        except BaseException:
            self._abandon_gather()
            raise
        self._work = None
        self.store.release(self.index)

    def _abandon_gather(self) -> None:
        """Give back what a gather that failed had taken. Its memory is not used again: the gather may still write."""
        memory, self._memory, self._work = self._memory, None, None
        self.residency = Residency.SHARDED
        if memory is not None:
            self.pool.drop(memory)
        self.store.release(self.index)

    @property
    def _swaps_in(self) -> bool:
        return getattr(self.store, "swaps_in", False)  # a store knows when it is attached, and most have no such thing

    @property
    def _brings_memory(self) -> bool:
        """Whether the memory is the unit's own at each use: the store copies into it, or torch cannot swap it."""
        return self._swaps_in or not _CAN_SWAP

    def _begin_own(self) -> None:
        self._own.begin(swaps_in=self._swaps_in)
        self._owns, self.residency = True, Residency.UNSHARDING

    def unshard(self, *, copy: bool = False) -> None:
        """Bring the memory in, whatever the state. The parameters' class is left as it is.

        copy: never the store's own memory, also on one shard, so that writes can be taken back.
        """
        if self.residency is Residency.UNSHARDED:
            if not copy or self._pooled or self._owns:
                return
            self.reshard()
        if self._owns or self._brings_memory:
            if self.residency is Residency.SHARDED:
                self._begin_own()
            self._own.finish()
            self.residency = Residency.UNSHARDED
            return
        if self.ranks.shard.size == 1:
            with self.observer.span("wait", self.name):
                self._memory = self.store.parameters(self.index)
            self._pooled = copy
            if copy:
                try:
                    self._memory = self.pool.take(self.layout.numel, self.dtype).copy_(self._memory)
                finally:
                    self.store.release(self.index)
        else:
            self.prefetch()
            with self.observer.span("gather", self.name):
                self._end_gather()
        assert self._memory is not None
        _put_under(self.flat, self._memory)
        self.residency = Residency.UNSHARDED

    def reshard(self) -> None:
        """Take the memory out; ends a gather or a copy under way."""
        if self.residency is Residency.SHARDED:
            return
        if self._owns:
            self._own.abandon()
            self._own.free()
            self._owns, self.residency = False, Residency.SHARDED
            return
        assert self._memory is not None
        if self.residency is Residency.UNSHARDING:
            self._end_gather()
        else:
            _take_away(self.flat)
        if self._pooled:
            self.pool.give(self._memory)
        else:
            self.store.release(self.index)
        self._memory = None
        self.residency = Residency.SHARDED

"""Puts memory under the parameters of one unit, and takes it away again. Knows neither visits nor gradients.

[Note: residency]
    SHARDED      no memory. The store has this rank's shard
    UNSHARDING   memory of the whole unit is being filled
    UNSHARDED    that memory is under the parameters
    LENT         the store's own memory is under the parameters. One shard only, and no second copy

              _begin()               _arrive()
    SHARDED ────────────> UNSHARDING ────────────> UNSHARDED
     ^ │ ^                    │                        │
     │ │ └────── _end() ──────┴──────── _end() ────────┘      _end() also where _begin() or _arrive() failed
     │ │
     │ └───── _lend() ─────> LENT
     └─────── _end() ─────────┘

[Note: memory under existing views]
`flat` is a storage of zero bytes between uses, and the parameters are views of it. To unshard, memory is put *under*
the storage (`_swap_data_ptr_` with an alias of a pooled buffer, or of the very tensor that the store lent), so no view
is re-pointed, nothing is copied and no version counter moves. Tensors that autograd saved share the storage and follow.
Where the store copies into given memory, and on a torch that cannot swap, the storage gets memory of its own and is
freed again with `resize_`. On CUDA that is the caching allocator's work, which hands the same blocks out again.

[Note: a copy, then a gather into the same memory]
A store that swaps in (`swaps_in`) copies into memory that it is given: on several shards into this rank's slice of
the unit's memory, which is also the gather's input. Which stream each of them is on is in [Note: streams].

    one shard     swap_in(whole) .................................... wait
    several       swap_in(slice)   wait, all_gather(whole, slice) ... wait
                  | _begin                                            | _arrive

[Note: a second cut]
hpZ of ZeRO++ (Wang et al. 2023, arXiv 2306.10209, section 3.2). A shard is cut over all ranks, and a gather of it
crosses the link between machines. The first gather after a change leaves 1/l of the unit on each of the l ranks of
every machine, and gathers after it, backward's above all, stay inside. Whether a copy is current is the same on every
rank: parameters change by a step, or by writes that all ranks make.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import Axis
from ..comm.ranks import Ranks
from ..layout import UnitLayout
from ..model.deferred_init import untouched
from ..pool import Pool
from ..precision import FLOATS, as_bytes
from ..store import Arrival, Observer, ShardStore
from ..tensors.version_counters import Stamp, Version

# torch >= 2.12. ZERO_CORE_SWAP=0 turns it off, to see what older versions do.
CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_") and os.environ.get("ZERO_CORE_SWAP") != "0"


class Residency(Enum):
    """The state of the memory under a unit's parameters: see [Note: residency]."""

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"
    LENT = "lent"

    @property
    def unsharded(self) -> bool:
        """Whether the parameters can be used, in whosever memory."""
        return self in (Residency.UNSHARDED, Residency.LENT)


TRANSITIONS = {  # the states that each starts from, and the one that it leads to
    "begin": ({Residency.SHARDED}, Residency.UNSHARDING),
    "arrive": ({Residency.UNSHARDING}, Residency.UNSHARDED),
    "lend": ({Residency.SHARDED}, Residency.LENT),
    "end": ({Residency.UNSHARDING, Residency.UNSHARDED, Residency.LENT}, Residency.SHARDED),
}


def put_under(flat: Any, memory: Tensor) -> None:  # Any: the swap is private
    """Gives `flat`, of zero bytes, the memory of a contiguous tensor of its size."""
    with torch._C._InferenceMode(False):  # torch.inference_mode() has lines at which Ctrl-C leaves it entered
        alias = torch._C._from_dlpack(torch._C._to_dlpack(memory.detach()))
        flat.untyped_storage()._swap_data_ptr_(alias.untyped_storage())


def take_away(flat: Any) -> None:
    if CAN_SWAP:
        flat.untyped_storage()._swap_data_ptr_(torch.UntypedStorage(0, device=flat.device))
    else:
        flat.untyped_storage().resize_(0)


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a contiguous tensor of this shape whose storage has no bytes. On the CPU it may exceed free memory."""
    if device.type != "cpu" or not CAN_SWAP or 0 in shape:
        empty = torch.empty(tuple(shape), dtype=dtype, device=device)
        empty.untyped_storage().resize_(0)
        return empty
    found = untouched(shape, dtype)
    take_away(found)
    return found


@dataclass(frozen=True)
class UnitContext:
    """The ranks, the store and the buffers of one sharded model, and the observer of its transfers."""

    ranks: Ranks
    store: ShardStore
    pool: Pool
    observer: Observer
    updates_later: bool = False  # on any rank, a unit's parameters may have to be waited for after a step
    may_give: bool = True  # visits may leave `p.grad`: no loss is scaled, and no update made in backward


class Secondary:
    """This rank's part of one unit. versions: those of the unit's parameters. inside: the ranks of this machine."""

    def __init__(self, inside: Axis, versions: Iterable[Version]) -> None:
        self._inside, self._stamp = inside, Stamp(versions)
        self._part: Tensor | None = None

    def part(self) -> Tensor | None:
        """Returns (numel / l,) of the unit's values. None: they have changed since, or were never gathered."""
        return self._part if self._part is not None and self._stamp.current() else None

    def keep(self, whole: Tensor) -> None:
        """Keeps this rank's part of `whole` (numel,), which was gathered from all ranks."""
        mine = whole.view(self._inside.size, -1)[self._inside.rank]
        if self._part is None:
            self._part = mine.clone()
        else:
            self._part.copy_(mine)
        self._stamp.renew()

    def forget(self) -> None:
        """Frees the memory."""
        self._part = None


class UnitMemory:
    """Flat storage of one dtype, (layout.numel,), that has memory only while it is needed."""

    def __init__(
        self, index: int, layout: UnitLayout, dtype: torch.dtype, context: UnitContext, *, exact: bool = False
    ) -> None:
        self._exact = exact  # gathered with all bits
        self.index, self.layout, self.name, self.dtype = index, layout, layout.name, dtype
        self.context = context
        self.ranks, self.store, self.pool, self.observer = context.ranks, context.store, context.pool, context.observer
        self.may_give = context.may_give
        self.residency = Residency.SHARDED
        self._memory: Tensor | None = None  # lent by the pool; None: of the storage, or of the store
        self._arrival: Arrival | None = None  # of the store's copy under way
        self._shard: Tensor | None = None  # lent by the store, while it is copied, gathered or used
        self._gathering: tuple[Any, bool] | None = None  # the gather's work, and whether it is inside the machine
        self.secondary: Secondary | None = None  # this rank's part for gathers inside the machine
        self.updating = False  # stepped, and not brought in since: the store may still be updating it
        self.flat = torch.empty(layout.numel, dtype=dtype, device=context.ranks.device)
        self.views = [self.flat.data[s.offset : s.stop].view(s.shape) for s in layout.slots]
        take_away(self.flat)

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's shard, padding included."""
        return self.layout.numel_of(self.ranks.shard.rank)

    @property
    def nbytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize

    @property
    def brings_memory(self) -> bool:
        """Whether the storage has memory of its own: the store copies into it, or torch cannot swap it."""
        return self.store.swaps_in or not CAN_SWAP

    def prefetch(self) -> None:
        """Starts to unshard. On one shard whose memory the store lends, only the store has something to start."""
        if self.residency is not Residency.SHARDED:
            return
        if self.ranks.shard.size == 1 and not self.store.swaps_in:
            self.store.prefetch(self.index)
        else:
            self._begin()

    def foresee(self) -> None:
        """Makes the store prefetch a unit that will be gathered after those under way, unless a gather inside the
        machine needs no store."""
        if self.secondary is None or self.secondary.part() is None:
            self.store.prefetch(self.index)

    def unshard(self, *, copy: bool = False) -> None:
        """Brings the memory in, whatever the state. The parameters' class is left as it is.

        copy: never use the store's own memory, even on one shard, so that writes can be taken back.
        """
        if copy and self.residency is Residency.LENT:
            self._end()
        if self.residency is Residency.SHARDED:
            if self.ranks.shard.size == 1 and not copy and not self.brings_memory:
                self._lend()
            else:
                self._begin()
        if self.residency is Residency.UNSHARDING:
            self._arrive()

    def reshard(self) -> None:
        """Takes the memory out; ends a gather or a copy under way."""
        if self.residency is Residency.UNSHARDING:
            with self._ending_on_error():
                self._end_gather()
        if self.residency is not Residency.SHARDED:
            self._end()

    def begin_anew(self) -> None:
        """Resets after Ctrl-C at any line: no memory, and nothing lent. No transfer may be under way."""
        self._memory = self._arrival = self._gathering = self._shard = None
        if self.secondary is not None:
            self.secondary.forget()
        self._resize(0) if self.brings_memory else take_away(self.flat)
        self.store.release(self.index)
        self.residency = Residency.SHARDED

    def _move(self, by: str) -> None:
        sources, new = TRANSITIONS[by]
        assert self.residency in sources, f"unit {self.name!r} goes from {self.residency} to {new} by {by}()"
        self.residency = new

    def _lend(self) -> None:
        with self.observer.span("wait", self.name):
            self._shard = self.store.parameters(self.index)
        self._move("lend")
        put_under(self.flat, self._shard)

    def _begin(self) -> None:
        self._move("begin")
        with self._ending_on_error():
            if self.brings_memory:
                self._resize(self.nbytes)
            else:
                self._memory = self.pool.take(self.layout.numel, self.dtype)
            kept = None if self.secondary is None else self.secondary.part()
            if self.store.swaps_in and kept is None:
                start, stop = self.layout.shard_range(self.ranks.shard.rank)
                self._arrival = self.store.swap_in(self.index, self._filled[start:stop])
            if self.ranks.shard.size > 1:
                with self.ranks.side.after_current():
                    whole, part = self._filled, self._await_shard() if kept is None else kept
                    if part.dtype not in FLOATS:
                        whole, part = as_bytes(whole), as_bytes(part)
                    with self.observer.span("gather", self.name):
                        if kept is not None:
                            self._gathering = self.ranks.all_gather_inside(whole, part, self.name), True
                        else:
                            rows = self.layout.rows(whole)  # None where `whole` is bytes: those are frozen
                            work = self.ranks.all_gather(whole, part, self.name, exact=self._exact, rows=rows)
                            self._gathering = work, False

    def _arrive(self) -> None:
        """Makes the current stream wait until the whole unit is there."""
        with self._ending_on_error():
            if self.ranks.shard.size > 1:
                with self.observer.span("gather", self.name):
                    self._end_gather()
            else:
                shard = self._await_shard()
                if self._shard is not None:
                    self._filled.copy_(shard)
        self._release_shard()
        if self._memory is not None:
            put_under(self.flat, self._memory)
        self._move("arrive")

    def _end(self, *, failed: bool = False) -> None:
        """failed: the pool does not lend the memory again, as a gather that failed may still write into it."""
        if self._arrival is not None:
            self._arrival.drop()
            self._arrival = None
        memory, self._memory, self._gathering = self._memory, None, None
        if self.residency is Residency.LENT:
            take_away(self.flat)
        elif memory is None:
            self._resize(0)
        else:
            if self.residency is Residency.UNSHARDED:
                take_away(self.flat)
            self.pool.drop(memory) if failed else self.pool.give(memory)
        self._release_shard()
        self._move("end")

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end(failed=True)
            raise

    def _resize(self, nbytes: int) -> None:
        storage = self.flat.untyped_storage()
        if storage.resizable():  # else a numpy array is over the memory, which stays for good
            storage.resize_(nbytes)

    @property
    def _filled(self) -> Tensor:
        """(numel,) the memory that is being filled, with a version counter of its own: autograd sees no write."""
        return self.flat.data if self._memory is None else self._memory

    def _await_shard(self) -> Tensor:
        """Returns this rank's shard, copied into the unit's memory or lent by the store."""
        with self.observer.span("wait", self.name):
            if self._arrival is None:
                self._shard = self.store.parameters(self.index)
                return self._shard
            self._arrival.wait()
            self._arrival = None
        start, stop = self.layout.shard_range(self.ranks.shard.rank)
        return self._filled[start:stop]

    def _release_shard(self) -> None:
        self.updating = False
        if self._shard is not None:
            self._shard = None
            self.store.release(self.index)

    def _end_gather(self) -> None:
        (work, inside), self._gathering = self._gathering or (None, False), None
        self.ranks.wait(work, "all_gather", self.name)
        # Also where this rank does not use the gathered unit: others may.
        if self.secondary is not None and work is not None and not inside:
            self.secondary.keep(self._filled)

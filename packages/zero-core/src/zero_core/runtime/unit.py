"""One unit's life: unshard, use, reshard, collect its gradients, reduce them. Knows neither modules nor order.

[Note: memory under existing views]
`flat` is a storage of zero bytes between uses, and the parameters are views of it. To unshard, memory is put *under*
the storage (`_swap_data_ptr_` with an alias of a pooled buffer, or of the very tensor that the store lent), so no view
is re-pointed, nothing is copied and no version counter moves. Tensors that autograd saved share the storage and follow.
Where the store copies into what it is given, and on a torch that cannot swap, the memory is the unit's own: own_memory.

[Note: changes before a backward]
A backward gathers the current values, even if a step or a write has changed them since the forward. Autograd raises if
a tensor that it saved was changed in place, which it knows by the tensor's version counter. So what moves a parameter's
counter in plain torch has to move it here. A write into the parameter itself does that without our help. After a step,
a loaded checkpoint or a write into a gathered copy, `increment_version` does it. Autograd then raises for the programs
for which it raises in plain torch, and lets others run: nothing has saved the bias of a linear layer, for example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..comm.collectives import Ranks
from ..errors import ChangedParameterError, GradientError
from ..layout import UnitLayout
from ..pool import Pool
from ..precision import round_to
from ..store import Observer, ShardStore
from .own_memory import OwnMemory
from .parameter import sharded_class

__all__ = ["Reduction", "Residency", "Unit"]

_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # torch >= 2.12


_ROW = 1024


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


class Unit:
    """Parameters unsharded, used and resharded together; on flat storage of one dtype."""

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        parameters: Sequence[nn.Parameter],
        groups: Sequence[int | None],
        *,
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        ranks: Ranks,
        store: ShardStore,
        pool: Pool,
        observer: Observer,
    ) -> None:
        self.index, self.layout, self.name = index, layout, layout.name
        self.parameters, self.groups = tuple(parameters), tuple(groups)
        self._classes = [type(parameter) for parameter in self.parameters]  # nn.Parameter, or the user's subclass
        self.dtype, self.reduce_dtype = dtype, reduce_dtype
        self.ranks, self.store, self.pool, self.observer = ranks, store, pool, observer
        self.trainable = any(group is not None for group in groups)
        self.residency = Residency.SHARDED
        self.users = 0  # open visits; the class of the parameters is nn.Parameter while there is one
        self.steps = [0] * len(self.parameters)
        self.used = [False] * len(self.parameters)  # since the last step, on this rank
        self.arrived = False  # a gradient since the last step, on every rank
        # What zero_grad() has not cleared: torch would add to it, and step it again. "stepped", "zeroed" or nothing;
        # "updated" until step(), by an update in backward.
        self.leftover: list[str] = [""] * len(self.parameters)
        self.dropped: set[int] = set()  # parameters whose `.grad` was set to None after it arrived
        self.gradient: Tensor | None = None  # (numel,) reduce dtype: this backward's, not reduced
        self.filled: set[int] = set()
        self.kept: Tensor | None = None  # (numel,) reduce dtype, fp32 once added to: earlier backwards', not reduced
        self._accumulates = False  # a kept gradient was added to once: fp32 from the first on, and no other memory
        self.owing = False  # a backward kept its gradient, on every rank, also where nothing arrived
        self.epochs = [0] * len(self.parameters)  # how often the values changed: by an update, a write, a checkpoint
        self.visits: Counter[Any] = Counter()  # by kind: some of them compare the values before and after
        self.copies = False  # a forward writes into the parameters: never the store's own memory, see `keep`
        self._versions: list[int] = []  # of the parameters, when the first of the open visits began
        self._checksum: Tensor | None = None
        self._lent = False
        self._memory: Tensor | None = None
        self._pooled = False  # the memory is a buffer of the pool, not the store's
        self._work: Any = None
        self._owns = False  # the memory under `flat` is its own: neither the store's nor the pool's
        self.flat = torch.empty(layout.numel, dtype=dtype, device=ranks.device)
        self.views = [self.flat.data[s.offset : s.stop].view(s.shape) for s in layout.slots]
        edges = [s.offset for s in layout.slots[1:]] + [layout.numel]
        self._own = OwnMemory(self.flat, index, layout, ranks=ranks, store=store, observer=observer)
        _take_away(self.flat)
        self._pads = [(s.stop, edge) for s, edge in zip(layout.slots, edges, strict=True) if s.stop < edge]

    # -- parameters ------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize

    def adopt_parameters(self, become: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Make the user's parameters views of `flat` through `become`, without memory. Once, at the start."""
        for parameter, view, kind in zip(self.parameters, self.views, self._classes, strict=True):
            parameter.grad = None
            become(parameter, view)
            parameter.__class__ = sharded_class(kind)

    def prefetch(self) -> None:
        """Start to unshard. On one shard whose memory the store lends there is nothing to start but the store."""
        if self.residency is not Residency.SHARDED:
            return
        swaps_in = self._swaps_in
        if self.ranks.shard.size == 1 and not swaps_in:
            self.store.prefetch(self.index)
            return
        if swaps_in or not _CAN_SWAP:
            self._begin_own(swaps_in)
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

    def _begin_own(self, swaps_in: bool) -> None:
        self._own.begin(swaps_in=swaps_in)
        self._owns, self.residency = True, Residency.UNSHARDING

    def unshard(self, *, copy: bool = False) -> None:
        """Bring the memory in, whatever the state. The parameters' class is left as it is.

        copy: never the store's own memory, also on one shard, so that writes can be taken back.
        """
        if self.residency is Residency.UNSHARDED:
            if not copy or self._pooled or self._owns:
                return
            self.reshard()
        if self._owns or self._swaps_in or not _CAN_SWAP:
            if self.residency is Residency.SHARDED:
                self._begin_own(self._swaps_in)
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

    def keep_written(self) -> None:
        """What a visit wrote goes to the store. To be called when the visit is over, with the memory still there.

        Where that was the store's own, what was there before is gone: every written parameter is kept whole, which
        costs a 16-bit one the low bits of its masters, and later visits get a copy.
        """
        start, stop = self.layout.shard_range(self.ranks.shard.rank)
        mine = self.flat.detach()[start:stop].clone()
        if self.keeps_writes:
            self.changed()
        elif self._pooled or self._owns:
            self.keep(mine)
        else:
            self.changed()
            self.copies = True
            written = {id(slot) for slot, k in zip(self.layout.slots, self.written(), strict=True) if k}
            self.reshard()
            for piece in self.layout.pieces(self.ranks.shard.rank):
                if id(piece.slot) in written:
                    values = mine[piece.shard_start : piece.shard_stop].float()
                    self.store.write_state(self.index, "master", piece.shard_start, values)

    def enter(self, audit: Any = None) -> None:
        """One more visit uses the parameters: of their own class, with memory, from here on.

        audit: a kind of visits. Of each kind the 1st, 2nd, 4th ... 256th visit and each 256th after that compares the
        values before and after, see `unseen_write`.
        """
        self.unshard(copy=self.copies)
        self.users += 1
        if self.users == 1:
            self._versions = [parameter._version for parameter in self.parameters]
            self._checksum = None
            self.visits[audit] += 1
            count = self.visits[audit]
            audits = count & (count - 1) == 0 if count < 256 else count % 256 == 0
            if audits and audit is not None and not self.keeps_writes and not self.flat.is_meta:
                self._checksum = self.checksum()
            for parameter, slot, kind in zip(self.parameters, self.layout.slots, self._classes, strict=True):
                parameter.__class__ = kind
                if parameter.dtype is not self.dtype or parameter.shape != slot.shape:
                    raise ChangedParameterError(
                        f"{slot.name} was {slot.shape}, {self.dtype} when the model was sharded and is now "
                        f"{tuple(parameter.shape)}, {parameter.dtype}: shard again a model built anew"
                    )

    def was_written(self) -> bool:
        """Whether anything wrote into the parameters since the first of the open visits began, but through `p.data`.

        Other memory that was given to a parameter (`p.data = tensor`) is copied into the unit's and let go.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for k, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
                alike = parameter.shape == view.shape and parameter.dtype == view.dtype
                if alike and parameter.data_ptr() != view.data_ptr():  # else the next visit refuses
                    view.copy_(parameter)
                    parameter.data = view
                    self._versions[k] = -1
        return any(self.written())

    def written(self) -> list[bool]:
        """For each parameter, whether its version counter moved since the first of the open visits began."""
        return [p._version != before for p, before in zip(self.parameters, self._versions, strict=True)]

    def unseen_write(self) -> Tensor | None:
        """() bool, on the device: whether values changed that no version counter told of. None: not compared."""
        before, self._checksum = self._checksum, None
        return None if before is None else self.checksum() != before

    @property
    def keeps_writes(self) -> bool:
        """Whether what a forward writes goes into the masters themselves, so that nothing can be lost."""
        masters = getattr(self.store, "lends_masters", False) and self.dtype == torch.float32
        return masters and _CAN_SWAP and not self._swaps_in and self.ranks.size == 1

    def changed(self) -> None:
        """The values of every parameter are others now."""
        self.epochs = [epoch + 1 for epoch in self.epochs]

    def overwritten(self, k: int) -> None:
        """Parameter k gets other values in a way that autograd does not see: [Note: changes before a backward]."""
        self.epochs[k] += 1
        increment_version(self.parameters[k])
        if self.users:
            self._versions[k] += 1  # no visit wrote it

    def checksum(self) -> Tensor:
        """() int64: of the unit's memory, read as integers in rows of `_ROW`; rows and columns count by their place."""
        words = self.flat.detach().view(torch.int64)
        whole = words[: words.numel() // _ROW * _ROW].view(-1, _ROW)
        sums = (words[whole.numel() :], whole.sum(0), whole.sum(1))
        weighed = [(each * torch.arange(1, 1 + each.numel(), device=each.device)).sum() for each in sums]
        return weighed[0] * 31 + weighed[1] * 37 + weighed[2]

    def keep(self, mine: Tensor) -> None:
        """Write this rank's slice (shard_numel,) to the store where it changed, so that other masters keep their bits.

        mine: in the unit's dtype, or fp32 masters. Not for what was written into the store's own memory.
        """
        self.changed()
        old = self.store.read_state(self.index, "master", 0, self.layout.shard_numel).to(mine.device)
        rounded = old
        if mine.dtype != torch.float32:
            rounded = torch.empty_like(mine)
            round_to(old, rounded)
        changed = mine != rounded
        if bool(changed.any()):
            self.store.write_state(self.index, "master", 0, torch.where(changed, mine.float(), old))

    def leave(self) -> None:
        """One visit fewer. The memory stays until reshard()."""
        self.users -= 1
        if self.users == 0:
            self.seal()

    def seal(self) -> None:
        """No visit uses the parameters: any use from here on is an external one."""
        self.users = 0
        for parameter, kind in zip(self.parameters, self._classes, strict=True):
            parameter.__class__ = sharded_class(kind)

    # -- gradients -------------------------------------------------------------------------------------------------

    def collect(self, k: int) -> None:
        """Move parameter k's `.grad` into the unit's flat gradient."""
        parameter = self.parameters[k]
        with torch._C.DisableTorchFunctionSubclass():
            gradient = parameter.grad
            parameter.grad = None
        if gradient is None or self.groups[k] is None:
            return
        slot = self.layout.slots[k]
        if gradient.layout is not torch.strided:
            raise GradientError(
                f"{slot.name} has a gradient of layout {gradient.layout}, and shards are dense: build the module with "
                "sparse=False (nn.Embedding, nn.EmbeddingBag)"
            )
        if self.gradient is None:
            self.gradient = self._gradient_memory()
            self.filled.clear()
        into = self.gradient[slot.offset : slot.stop].view(slot.shape)
        with torch.no_grad():  # backward(create_graph=True) runs with gradients enabled
            into.add_(gradient) if k in self.filled else into.copy_(gradient)
        self.filled.add(k)
        self.used[k] = True

    def _gradient_memory(self) -> Tensor:
        """The store's own memory where nothing happens between here and there, else a pooled buffer."""
        self._lent = False
        if self.ranks.size == 1:
            lent = self.store.gradient_buffer(self.index)
            if lent is not None:
                self._lent = True
                return lent
        return self.pool.take(self.layout.numel, self.reduce_dtype)

    def whole_gradient(self) -> Tensor:
        """The flat gradient with zeros where nothing arrived: unused parameters, frozen ones, padding."""
        if self.gradient is None:
            self.gradient = self._gradient_memory()
            self.filled.clear()
        for k, slot in enumerate(self.layout.slots):
            if k not in self.filled:
                self.gradient[slot.offset : slot.stop].zero_()
                self.filled.add(k)
        for start, stop in self._pads:
            self.gradient[start:stop].zero_()
        return self.gradient

    def holds_gradient(self, k: int) -> bool:
        """Whether parameter k may have a gradient, which on several ranks may be another rank's."""
        anywhere = self.used[k] or (self.arrived and self.ranks.size > 1)
        there = anywhere and k not in self.dropped
        return (there or bool(self.leftover[k])) and self.groups[k] is not None

    def drop(self, k: int) -> None:
        """`p.grad = None`: the parameter is not stepped, nor counted in the norm. See forget_dropped."""
        self.leftover[k] = ""
        self.dropped.add(k)
        self.used[k] = False

    def forget_dropped(self) -> None:
        """Zero what was dropped. Late, because where all is dropped there is no need to."""
        for k in sorted(self.dropped):
            self.ranks.fold(self.index * 8191 + k)
            slot = self.layout.slots[k]
            if self.kept is not None:
                self.kept[slot.offset : slot.stop].zero_()
            for piece in self.layout.pieces(self.ranks.shard.rank):
                if piece.slot is slot:
                    self.store.discard_gradient(self.index, piece.shard_start, piece.shard_stop)
        self.dropped.clear()

    def consumed(self, leftover: str = "") -> None:
        """Every gradient was stepped or discarded. leftover: what torch would still have where there was one."""
        kept = [leftover if used or left else "" for used, left in zip(self.used, self.leftover, strict=True)]
        self.leftover = kept
        self.used = [False] * len(self.used)
        self.arrived = False
        self.dropped.clear()

    @property
    def late(self) -> bool:
        """Whether a gradient is kept that came after its backward's reduction, on this rank at least."""
        return self.kept is not None and not self.owing

    def keep_gradient(self, *, late: bool = False) -> None:
        """Add this backward's gradient to the local fp32 sum; nothing is reduced. late: see `Reducer.retire_late`."""
        self.forget_dropped()
        if not late:
            self.owing = self.arrived = True
        if self.gradient is None:
            return
        whole = self.whole_gradient()
        if self.kept is None:
            if self._accumulates and whole.dtype != torch.float32:
                self.kept = self.pool.take(self.layout.numel, torch.float32).copy_(whole)
                self.drop_gradient()
            else:  # the first keeps its dtype: nothing has been added yet
                self.kept, self.gradient = whole, None
                self.filled.clear()
            return
        if self.kept.dtype != torch.float32:
            wide = self.pool.take(self.layout.numel, torch.float32).copy_(self.kept)
            self.pool.drop(self.kept)
            self.kept, self._accumulates = wide, True
        self.kept.add_(whole)
        self.drop_gradient()

    def drop_gradient(self) -> None:
        """Forget this backward's gradient."""
        if self.gradient is not None and not self._lent:
            self.pool.give(self.gradient)
        self.gradient = None
        self.filled.clear()

    def drop_kept(self) -> None:
        self.owing = False
        if self.kept is not None:
            self.pool.give(self.kept)
            self.kept = None

    def start_reduce(self) -> Reduction:
        """Begin the collective that turns the whole gradient into this rank's shard of the mean."""
        self.forget_dropped()
        self.arrived = True
        if self.kept is not None:
            if self.gradient is not None:
                self.keep_gradient()
            if self.kept.dtype != self.reduce_dtype:
                self.gradient = self._gradient_memory().copy_(self.kept)
                self.drop_kept()
            else:
                self.gradient, self.kept = self.kept, None
            self.filled = set(range(len(self.parameters)))
        whole = self.whole_gradient()
        self.owing = False
        self.gradient = None
        self.filled.clear()
        return Reduction(self, whole, self._lent)


class Reduction:
    """A unit's gradient on its way to the store."""

    def __init__(self, unit: Unit, whole: Tensor, lent: bool) -> None:
        self.unit, self.whole, self.lent = unit, whole, lent
        self.part, self._pooled = whole, False
        self.update: Callable[[], None] | None = None  # what to call when the shard is the store's
        self._work: Any = None
        ranks = unit.ranks
        with unit.observer.span("reduce", unit.name):
            if ranks.shard.size > 1:
                out = unit.store.gradient_buffer(unit.index)
                self._pooled = out is None
                self.part = unit.pool.take(unit.layout.shard_numel, unit.reduce_dtype) if out is None else out
                self._work = ranks.reduce_scatter(self.part, whole, unit.name, unit.index, unit.pool)
            elif ranks.replicate.size > 1:
                self._work = ranks.average_replicas(whole, unit.name, unit.index, unit.pool)

    def finish(self) -> None:
        """Wait, average over replicas, hand the shard to the store."""
        unit, ranks = self.unit, self.unit.ranks
        with unit.observer.span("reduce", unit.name):
            ranks.wait(self._work, "reduce_scatter" if ranks.shard.size > 1 else "all_reduce", unit.name)
            if ranks.shard.size > 1 and ranks.replicate.size > 1:
                work = ranks.average_replicas(self.part, unit.name, unit.index, unit.pool)
                ranks.wait(work, "all_reduce", unit.name)
        unit.store.accept_gradient(unit.index, self.part)
        if self._pooled:
            unit.pool.give(self.part)
        if not self.lent:
            unit.pool.give(self.whole)

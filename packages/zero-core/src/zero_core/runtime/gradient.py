"""A unit's gradient before it is reduced: collected from the parameters, kept over backwards, handed to a collective.

Owns what arrived since the last step, and which memory it lies in. When a gradient is complete is `hooks`'s to say, and
what becomes of it `reducer`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.ranks import Ranks
from ..errors import GradientError
from ..layout import UnitLayout
from ..pool import Pool
from ..store import Observer, ShardStore

__all__ = ["Reduction", "UnitGradient"]


class UnitGradient:
    """The flat gradient of one unit's parameters, in the reduce dtype; by the parameters' numbers in the unit."""

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        parameters: Sequence[nn.Parameter],
        groups: Sequence[int | None],
        *,
        dtype: torch.dtype,
        ranks: Ranks,
        store: ShardStore,
        pool: Pool,
        observer: Observer,
    ) -> None:
        self.index, self.layout, self.name = index, layout, layout.name
        self.parameters, self.groups, self.dtype = parameters, groups, dtype
        self.ranks, self.store, self.pool, self.observer = ranks, store, pool, observer
        self.used = [False] * len(parameters)  # since the last step, on this rank
        self.arrived = False  # a gradient since the last step, on every rank
        # What zero_grad() has not cleared: torch would add to it, and step it again. "stepped", "zeroed" or nothing;
        # "updated" until step(), by an update in backward.
        self.leftover: list[str] = [""] * len(parameters)
        self.dropped: set[int] = set()  # parameters whose `.grad` was set to None after it arrived
        self.current: Tensor | None = None  # (numel,) reduce dtype: this backward's, not reduced
        self.filled: set[int] = set()
        self.kept: Tensor | None = None  # (numel,) reduce dtype, fp32 once added to: earlier backwards', not reduced
        self.owing = False  # a backward kept its gradient, on every rank, also where nothing arrived
        self._accumulates = False  # a kept gradient was added to once: fp32 from the first on, and no other memory
        self._lent = False  # the memory of `current` is the store's
        edges = [slot.offset for slot in layout.slots[1:]] + [layout.numel]
        self._pads = [(s.stop, edge) for s, edge in zip(layout.slots, edges, strict=True) if s.stop < edge]

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
        if self.current is None:
            self.current = self._memory()
            self.filled.clear()
        into = self.current[slot.offset : slot.stop].view(slot.shape)
        with torch.no_grad():  # backward(create_graph=True) runs with gradients enabled
            into.add_(gradient) if k in self.filled else into.copy_(gradient)
        self.filled.add(k)
        self.used[k] = True

    def _memory(self) -> Tensor:
        """The store's own memory where nothing happens between here and there, else a pooled buffer."""
        self._lent = False
        if self.ranks.size == 1:
            lent = self.store.gradient_buffer(self.index)
            if lent is not None:
                self._lent = True
                return lent
        return self.pool.take(self.layout.numel, self.dtype)

    def whole(self) -> Tensor:
        """The flat gradient with zeros where nothing arrived: unused parameters, frozen ones, padding."""
        if self.current is None:
            self.current = self._memory()
            self.filled.clear()
        for k, slot in enumerate(self.layout.slots):
            if k not in self.filled:
                self.current[slot.offset : slot.stop].zero_()
                self.filled.add(k)
        for start, stop in self._pads:
            self.current[start:stop].zero_()
        return self.current

    def holds(self, k: int) -> bool:
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

    def keep(self, *, late: bool = False) -> None:
        """Add this backward's gradient to the local fp32 sum; nothing is reduced. late: see `Reducer.retire_late`."""
        self.forget_dropped()
        if not late:
            self.owing = self.arrived = True
        if self.current is None:
            return
        whole = self.whole()
        if self.kept is None:
            if self._accumulates and whole.dtype != torch.float32:
                self.kept = self.pool.take(self.layout.numel, torch.float32).copy_(whole)
                self.drop_current()
            else:  # the first keeps its dtype: nothing has been added yet
                self.kept, self.current = whole, None
                self.filled.clear()
            return
        if self.kept.dtype != torch.float32:
            wide = self.pool.take(self.layout.numel, torch.float32).copy_(self.kept)
            self.pool.drop(self.kept)
            self.kept, self._accumulates = wide, True
        self.kept.add_(whole)
        self.drop_current()

    def drop_current(self) -> None:
        """Forget this backward's gradient."""
        if self.current is not None and not self._lent:
            self.pool.give(self.current)
        self.current = None
        self.filled.clear()

    def drop_kept(self) -> None:
        self.owing = False
        if self.kept is not None:
            self.pool.give(self.kept)
            self.kept = None

    def reduce(self) -> Reduction:
        """Begin the collective that turns the whole gradient into this rank's shard of the mean."""
        self.forget_dropped()
        self.arrived = True
        if self.kept is not None:
            if self.current is not None:
                self.keep()
            if self.kept.dtype != self.dtype:
                self.current = self._memory().copy_(self.kept)
                self.drop_kept()
            else:
                self.current, self.kept = self.kept, None
            self.filled = set(range(len(self.parameters)))
        whole = self.whole()
        self.owing = False
        self.current = None
        self.filled.clear()
        return Reduction(self, whole, self._lent)


class Reduction:
    """A unit's gradient on its way to the store."""

    def __init__(self, of: UnitGradient, whole: Tensor, lent: bool) -> None:
        self.of, self.whole, self.lent = of, whole, lent
        self.part, self._pooled = whole, False
        self.update: Callable[[], None] | None = None  # what to call when the shard is the store's
        self._work: Any = None
        ranks = of.ranks
        with of.observer.span("reduce", of.name):
            if ranks.shard.size > 1:
                out = of.store.gradient_buffer(of.index)
                self._pooled = out is None
                self.part = of.pool.take(of.layout.shard_numel, of.dtype) if out is None else out
                self._work = ranks.reduce_scatter(self.part, whole, of.name, of.index)
            elif ranks.replicate.size > 1:
                self._work = ranks.average_replicas(whole, of.name, of.index)

    def finish(self) -> None:
        """Wait, average over replicas, hand the shard to the store."""
        of, ranks = self.of, self.of.ranks
        with of.observer.span("reduce", of.name):
            ranks.wait(self._work, "reduce_scatter" if ranks.shard.size > 1 else "all_reduce", of.name)
            if ranks.shard.size > 1 and ranks.replicate.size > 1:
                work = ranks.average_replicas(self.part, of.name, of.index)
                ranks.wait(work, "all_reduce", of.name)
        of.store.accept_gradient(of.index, self.part)
        if self._pooled:
            of.pool.give(self.part)
        if not self.lent:
            of.pool.give(self.whole)

"""Collects a unit's gradient from its parameters, keeps it over backwards, and hands it to a collective.

Owns the gradients that arrived since the last step, and their memory. Not here: when a gradient is complete (in
hooks/backward_pass.py), and its way into the store (in gradients/reducer.py).

[Note: the gradient of a step]
    NONE      no gradient has arrived since the last step
    OWED      every rank keeps one that is not reduced (stage 1, no_sync), also where nothing arrived on this rank
    REDUCED   the store has one. OWED | REDUCED: it lacks the owed one

    keep()       adds OWED
    reduce()     leads to REDUCED from everywhere: the store has all gradients that arrived
    discard()    leads to NONE from everywhere
    consumed()   leads to NONE from NONE and REDUCED. The step calls it: an owed gradient would be lost

The states are the same on every rank, because all ranks reduce in the same order. The gradients on a rank are its own:
`current` is the one of this backward, `kept` the sum of earlier ones. A gradient that is kept and not owed came late,
perhaps on this rank only, and is reduced at the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, Flag
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GradientError
from ..tensors.version_counters import Version
from .unit_memory import UnitMemory


class GradientState(Flag):
    """How far the gradient of a unit has come since the last step: see [Note: the gradient of a step]."""

    NONE = 0
    OWED = 1
    REDUCED = 2


class Leftover(Enum):
    """A parameter's gradient in torch that zero_grad() has not cleared: torch would add to it, and step it again."""

    NOTHING = ""
    STEPPED = "stepped"
    ZEROED = "zeroed"
    UPDATED = "updated"  # until step(), by an update in backward


@dataclass(frozen=True)
class Arriving:
    """The gradient of one backward. values: (numel,) reduce dtype, in memory of the pool or the store."""

    values: Tensor
    filled: set[int]  # the parameters whose gradients it has


class UnitGradient:
    """The flat gradient of one unit's parameters, in the reduce dtype; by the parameters' numbers in the unit."""

    def __init__(
        self, unit: UnitMemory, parameters: Sequence[nn.Parameter], groups: Sequence[int | None], dtype: torch.dtype
    ) -> None:
        self.index, self.layout, self.name = unit.index, unit.layout, unit.layout.name
        self.parameters, self.groups, self.dtype = parameters, groups, dtype
        self.ranks, self.store, self.pool, self.observer = unit.ranks, unit.store, unit.pool, unit.observer
        self.state = GradientState.NONE
        self.used = [False] * len(parameters)  # since the last step, on this rank
        self.graphs = [False] * len(parameters)  # whether p.grad has a graph in torch: backward(create_graph=True)
        self.leftover = [Leftover.NOTHING] * len(parameters)
        self.versions = [Version() for _ in parameters]
        self.in_store = Version()  # of the gradient in the store
        self.lost = False  # a backward since the last step raised, and its gradients of this unit are gone
        self.dropped: set[int] = set()  # parameters whose `.grad` was set to None after it arrived
        self.current: Arriving | None = None  # this backward's
        self.kept: Tensor | None = None  # (numel,) reduce dtype, fp32 once added to: earlier backwards', not reduced
        self._accumulates = False  # a kept gradient was added to once: fp32 from the first on, and no other memory
        self._edges = unit.layout.edges()
        self.may_give = unit.may_give

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
        current = self.begun()
        into = current.values[slot.offset : slot.stop].view(slot.shape)
        with torch.no_grad():  # backward(create_graph=True) runs with gradients enabled
            into.add_(gradient) if k in current.filled else into.copy_(gradient)
        current.filled.add(k)
        self.used[k] = True
        self.graphs[k] |= gradient.requires_grad
        self.versions[k].wrote()

    def _left(self, *, forget: bool = False) -> list[int]:
        """Returns parameters with a `.grad` that a visit has left, or a backward that ended before `collect`. forget:
        drops these."""
        with torch._C.DisableTorchFunctionSubclass():
            left = [k for k, p in enumerate(self.parameters) if self.groups[k] is not None and p.grad is not None]
            for k in left if forget else ():
                self.parameters[k].grad = None
        return left

    def given(self) -> list[int]:
        """Returns parameters with a `.grad` that a visit has left: of a backward inside of it, or set by the user. It
        goes to the shards with that of a later backward, or before the step. Raises GradientError where torch would
        show another one."""
        for k in (left := self._left()):
            if self.used[k] or self.leftover[k] in (Leftover.UPDATED, Leftover.STEPPED) or not self.may_give:
                self.lost = bool(self._left(forget=True))
                why = "a first gradient is in shards" if self.may_give else "update_in_backward or loss_scale= is used"
                raise GradientError(
                    f"{self.layout.slots[k].name} got a gradient, of a backward() or by p.grad = tensor, inside the "
                    f"forward or backward of unit {self.name!r} or inside zero_core.gathered. p.grad cannot show what "
                    f"it would in torch, because {why}. Call zero_grad(). Then call backward() after this forward, or "
                    "zero_core.set_full_gradient(p, tensor) before step(). In a torch.autograd.Function, return the "
                    "gradient from its backward(). To step another optimizer in this forward, set p.grad to the "
                    "result of torch.autograd.grad(), and to None after that step"
                )
        return left

    def _memory(self) -> Tensor:
        """The store's own memory if there is one rank and the store lends it, else a pooled buffer."""
        lent = self.store.gradient_buffer(self.index) if self.ranks.size == 1 else None
        return self.pool.take(self.layout.numel, self.dtype) if lent is None else lent

    def begun(self) -> Arriving:
        """Returns the gradient of this backward, with memory."""
        self.current = self.current or Arriving(self._memory(), set())
        return self.current

    def _complete(self) -> Tensor:
        """Takes `current`, with zeros where nothing arrived: unused parameters, frozen ones, padding."""
        current, self.current = self.begun(), None
        for k, (slot, edge) in enumerate(zip(self.layout.slots, self._edges, strict=True)):
            start = slot.stop if k in current.filled else slot.offset
            if start < edge:
                current.values[start:edge].zero_()
        return current.values

    def holds(self, k: int) -> bool:
        """Whether parameter k may have a gradient, on this rank or another."""
        return self.waits(k) or (self.leftover[k] is not Leftover.NOTHING and self.groups[k] is not None)

    def waits(self, k: int) -> bool:
        """Whether step() would use a gradient of parameter k, perhaps another rank's, or count an update of it."""
        anywhere = self.used[k] or (self.arrived and self.ranks.size > 1)
        there = (anywhere and k not in self.dropped) or self.leftover[k] is Leftover.UPDATED
        return there and self.groups[k] is not None

    def left(self, leftover: Leftover) -> list[int]:
        """Parameters of the optimizer whose leftover is `leftover`."""
        return [k for k, left in enumerate(self.leftover) if left is leftover and self.groups[k] is not None]

    def drop(self, k: int) -> None:
        """`p.grad = None`: the parameter is not stepped, nor counted in the norm. See forget_dropped."""
        self.leftover[k] = Leftover.NOTHING
        self.dropped.add(k)
        self.used[k] = self.graphs[k] = False
        self.versions[k].ended()

    def forget_dropped(self) -> None:
        """Zero the dropped gradients. Late, because there is no need to if all are dropped."""
        for k in sorted(self.dropped):
            self.ranks.fold(self.index * 8191 + k)
            self.in_store.wrote()
            slot = self.layout.slots[k]
            if self.kept is not None:
                self.kept[slot.offset : slot.stop].zero_()
            if (piece := self.layout.piece(self.ranks.shard.rank, k)) is not None:
                self.store.discard_gradient(self.index, piece.shard_start, piece.shard_stop)
        self.dropped.clear()

    def consumed(self, leftover: Leftover) -> None:
        """The step has used every gradient. leftover: torch's gradient now of the parameters that had one."""
        assert not self.owed, f"the gradient that is owed of unit {self.name!r} would be lost"
        self.state = GradientState.NONE
        self._clear(leftover)

    def discard(self, leftover: Leftover) -> None:
        """Forget every gradient that the store does not have yet. leftover: as in `consumed`."""
        self.state = GradientState.NONE
        self._left(forget=True)
        self.drop_current()
        if self.kept is not None:
            self.pool.give(self.kept)
            self.kept = None
        self._clear(leftover)

    def begin_anew(self) -> None:
        """After Ctrl-C at any line: there is no gradient, and a step refuses to go without those that there were."""
        lost = bool(self._left(forget=True)) or self.lost or self.arrived or any(self.used) or self.current is not None
        self.current = self.kept = None
        self.state = GradientState.NONE
        self._clear_flags()
        self.lost = lost

    def _clear(self, leftover: Leftover) -> None:
        for k, left in enumerate(self.leftover):
            if self.groups[k] is not None and (self.used[k] or left is not Leftover.NOTHING):
                self.leftover[k] = leftover
        self._clear_flags()

    def _clear_flags(self) -> None:
        self.lost = False
        self.used, self.graphs = [False] * len(self.used), [False] * len(self.used)
        self.in_store.wrote()
        for version in self.versions:
            version.ended()
        self.dropped.clear()

    @property
    def arrived(self) -> bool:
        """Whether there is a gradient since the last step, on some rank."""
        return self.state is not GradientState.NONE

    @property
    def owed(self) -> bool:
        """Whether every rank has a gradient that is not reduced."""
        return GradientState.OWED in self.state

    @property
    def stored(self) -> bool:
        """Whether the store has a gradient since the last step."""
        return GradientState.REDUCED in self.state

    @property
    def late(self) -> bool:
        """Whether a gradient is kept that came after its backward's reduction, on this rank at least."""
        return self.kept is not None and not self.owed

    @property
    def zeros(self) -> int:
        """How many parameters have zeros in torch: zero_grad(set_to_none=False) left them, and nothing arrived."""
        return sum(not self.used[k] for k in self.left(Leftover.ZEROED))

    def keep(self) -> None:
        """Add this backward's gradient to the local fp32 sum. It is owed, and not reduced yet."""
        self.state |= GradientState.OWED
        self.keep_late()

    def keep_late(self) -> None:
        """Add this backward's gradient, if there is one, to the sum, owed or not: see `Reducer.reduce_unit_late`."""
        self.forget_dropped()
        if self.current is None:
            return
        whole = self._complete()
        if self.kept is None and (whole.dtype == torch.float32 or not self._accumulates):
            self.kept = whole  # the first keeps its dtype: nothing has been added yet
            return
        if self.kept is None:
            self.kept = self.pool.take(self.layout.numel, torch.float32).copy_(whole)
        else:
            if self.kept.dtype != torch.float32:
                wide = self.pool.take(self.layout.numel, torch.float32).copy_(self.kept)
                self.pool.drop(self.kept)
                self.kept, self._accumulates = wide, True
            self.kept.add_(whole)
        self.pool.give_if_lent(whole)

    def drop_current(self) -> None:
        """Forget this backward's gradient."""
        if self.current is not None:
            self.lost |= bool(self.current.filled)
            self.pool.give_if_lent(self.current.values)
            self.current = None

    def reduce(self) -> Reduction:
        """Begin the collective that turns the whole gradient into this rank's shard of the mean."""
        self.forget_dropped()
        self.state = GradientState.REDUCED
        if self.kept is None:
            return Reduction(self, self._complete())
        self.keep_late()
        whole, self.kept = self.kept, None
        if whole.dtype == self.dtype:
            return Reduction(self, whole)
        narrow = self._memory().copy_(whole)
        self.pool.give(whole)
        return Reduction(self, narrow)


class Reduction:
    """A unit's gradient on its way to the store."""

    def __init__(self, of: UnitGradient, whole: Tensor) -> None:
        self.of, self.whole, self.part = of, whole, whole
        self._work: Any = None
        ranks = of.ranks
        with of.observer.span("reduce", of.name):
            if ranks.shard.size > 1:
                out = of.store.gradient_buffer(of.index)
                self.part = of.pool.take(of.layout.numel_of(ranks.shard.rank), of.dtype) if out is None else out
                self._work = ranks.reduce_scatter(self.part, whole, of.name, rows=of.layout.rows(whole))
            elif ranks.replicate.size > 1:
                self._work = ranks.average_replicas(whole, of.name)

    def finish(self) -> None:
        """Wait, average over replicas, hand the shard to the store."""
        of, ranks = self.of, self.of.ranks
        with of.observer.span("reduce", of.name):
            ranks.wait(self._work, "reduce_scatter" if ranks.shard.size > 1 else "all_reduce", of.name)
            if ranks.shard.size > 1 and ranks.replicate.size > 1:
                ranks.wait(ranks.average_replicas(self.part, of.name), "all_reduce", of.name)
        of.in_store.wrote()
        of.store.accept_gradient(of.index, self.part)
        of.pool.give_if_lent(self.part)
        of.pool.give_if_lent(self.whole)  # the same as the part where nothing is scattered: given once

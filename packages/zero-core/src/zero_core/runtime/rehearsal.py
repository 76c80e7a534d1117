"""How large one rank's pool becomes: what the steps of a run take from it and give back, rehearsed over sizes alone.

The twin of what `hooks`, `unit` and `reducer` do with the pool, without tensors, modules or ranks; a test holds its
result to the run's. A unit is used once a pass, in the order given. Every micro-batch has a gradient of every unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ..pool import Buffer, Shelf
from .residents import Residents, Turn
from .stages import STAGES

__all__ = ["Rehearsal", "UnitSize"]


@dataclass(frozen=True)
class UnitSize:
    """One unit: `numel` elements, padding included, of `itemsize` bytes.

    `encloses`: it is the model's own unit, in use from the first unit's turn to the last's.
    """

    numel: int
    itemsize: int
    trainable: bool = True
    encloses: bool = False


class _Unit:
    """What one unit has of the pool."""

    def __init__(self, size: UnitSize) -> None:
        self.size, self.nbytes = size, size.numel * size.itemsize
        self.users = 0
        self.ready = False  # unsharded; gathered, but not ready: ahead of its use
        self.gathered: Buffer | None = None
        self.gradient: Buffer | None = None
        self.kept: Buffer | None = None
        self.kept_itemsize = 0
        self.sums = False  # a kept gradient was added to once
        self.arrived = 0  # gradients that went to the store in this step


@dataclass
class Rehearsal:
    """Steps of `accumulate` micro-batches on one rank of shard_count x replicas.

    no_sync: all micro-batches but the last are inside `zero_core.no_sync`. lends: of how many gradients a step the
    store brings the memory (`gradient_buffer`); a store that only keeps sums apart brings that of the first. gathers:
    units are gathered into the pool; False where they have memory of their own. exchanges: the ranks add up what they
    exchanged, as on gloo; False: the backend reduces, as NCCL does.
    """

    sizes: Iterable[UnitSize]
    stage: int
    _: KW_ONLY
    shard_count: int
    reduce_itemsize: int
    replicas: int = 1
    accumulate: int = 1
    no_sync: bool = False
    prefetch_bytes: int = 0
    resident_bytes: int = 0
    lends: int = 0
    gathers: bool = True
    exchanges: bool = True

    def pooled_bytes(self) -> int:
        """Most bytes of the rank's pool."""
        self.size, self.row = self.shard_count * self.replicas, STAGES[self.stage]
        self.residents, self.turn = Residents(self.resident_bytes), Turn(self.prefetch_bytes)
        self.units = [_Unit(size) for size in self.sizes]
        self.roots = [unit for unit in self.units if unit.size.encloses]
        self.passing = [unit for unit in self.units if not unit.size.encloses]
        self.shelf = Shelf(lambda nbytes: None)
        self.sharded = len(self.units)  # how many are
        self.under_way: list[Buffer] = []  # of the reduction that was begun last
        self.averaging = 0  # bytes that it takes of the pool at its end, to average over replicas
        several = min(self.accumulate, 3)  # the fourth micro-batch, and any after it, takes what the third took
        for step in range(2):
            for micro in range(several):
                self.forward(foreseen=step + micro > 0)
                self.backward(held_back=self.no_sync and micro + 1 < several)
            self.step()
        return self.shelf.peak_nbytes

    def forward(self, *, foreseen: bool) -> None:
        """`foreseen`: a pass went before, so that units can be gathered ahead."""
        order = self.passing if foreseen else []
        for unit in self.roots:
            self.enter(unit)
        self.prefetch(order, 0)
        for number, unit in enumerate(self.passing):
            self.enter(unit)
            self.prefetch(order, number + 1)
            self.leave(unit, turning=True)
        for unit in self.roots:
            self.leave(unit, turning=True, outermost=True)

    def backward(self, *, held_back: bool) -> None:
        for unit in self.roots:
            self.enter(unit)
        order = self.passing[::-1]
        self.prefetch(order, 0)
        for unit in self.roots:
            self.collect(unit)
        for number, unit in enumerate(order):
            self.enter(unit)
            if number:
                self.close(order[number - 1], held_back)
            self.prefetch(order, number + 1)
            self.collect(unit)
        for unit in [*order[-1:], *self.roots]:
            self.close(unit, held_back)
        self.finish()

    def step(self) -> None:
        for unit in self.units:
            self.reshard(unit)
        for unit in reversed(self.units):
            if unit.kept is not None:
                self.reduce(unit)
        self.finish()
        for unit in self.units:
            unit.arrived = 0

    # -- parameters --------------------------------------------------------------------------------------------------

    def gather(self, unit: _Unit) -> None:
        if self.gathers and self.shard_count > 1 and unit.gathered is None:
            unit.gathered = self.shelf.take(unit.nbytes)
            self.sharded -= 1

    def enter(self, unit: _Unit) -> None:
        self.gather(unit)
        unit.ready = True
        unit.users += 1

    def prefetch(self, order: Sequence[_Unit], following: int) -> None:
        """Units of `order` from number `following` on, as many as the bytes allow and one at least."""
        budget, self.turn.spare_bytes = self.prefetch_bytes, 0
        while self.gathers and self.shard_count > 1 and self.sharded and following < len(order):
            unit: Any = order[following]
            following += 1
            if unit.ready:
                budget -= self.turn.ahead_bytes(unit)
                continue
            if budget <= 0 or (budget < unit.nbytes and budget < self.prefetch_bytes):
                return
            budget -= unit.nbytes
            self.gather(unit)
        self.turn.spare_bytes = budget

    def leave(self, unit: Any, *, turning: bool = False, outermost: bool = False) -> None:
        unit.users -= 1
        if not self.row.keeps_parameters:
            self.turn.discard(unit)
            evicted: Any  # as much of a zero_core.runtime.unit.Unit as these ask for
            leaving: Any
            for evicted in self.residents.admit(unit, evict=True):
                for leaving in self.turn.admit(evicted, outermost=outermost) if turning else [evicted]:
                    if leaving.users == 0:
                        self.reshard(leaving)

    def reshard(self, unit: _Unit) -> None:
        unit.ready = False
        if unit.gathered is not None:
            self.shelf.give(unit.gathered)
            unit.gathered = None
            self.sharded += 1

    # -- gradients ---------------------------------------------------------------------------------------------------

    def collect(self, unit: _Unit) -> None:
        if unit.size.trainable and not (self.size == 1 and unit.arrived < self.lends):
            unit.gradient = self.shelf.take(unit.size.numel * self.reduce_itemsize)

    def close(self, unit: _Unit, held_back: bool) -> None:
        if unit.gradient is not None and self.size > 1 and (self.row.keeps_gradients or held_back):
            self.keep(unit)
        elif unit.size.trainable:
            self.reduce(unit)
        self.leave(unit)

    def keep(self, unit: _Unit) -> None:
        assert unit.gradient is not None
        gradient, unit.gradient = unit.gradient, None
        if unit.kept is None and not (unit.sums and self.reduce_itemsize != 4):
            unit.kept, unit.kept_itemsize = gradient, self.reduce_itemsize
            return
        if unit.kept is None or unit.kept_itemsize != 4:
            wide = self.shelf.take(unit.size.numel * 4)
            if unit.kept is not None:
                self.shelf.drop(unit.kept)
            unit.kept, unit.kept_itemsize, unit.sums = wide, 4, True
        self.shelf.give(gradient)

    def reduce(self, unit: _Unit) -> None:
        if unit.kept is not None:
            if unit.gradient is not None:
                self.keep(unit)
            whole, unit.kept = unit.kept, None
            if unit.kept_itemsize != self.reduce_itemsize:
                wide, whole = whole, self.shelf.take(unit.size.numel * self.reduce_itemsize)
                self.shelf.give(wide)
            unit.gradient = whole
        begun = [] if unit.gradient is None else [unit.gradient]
        unit.gradient = None
        if self.shard_count > 1:
            if unit.arrived >= self.lends:
                begun.insert(0, self.shelf.take(unit.size.numel // self.shard_count * self.reduce_itemsize))
            if self.exchanges:
                begun.insert(0, self.shelf.take(unit.size.numel * self.reduce_itemsize))
        elif self.exchanges and self.replicas > 1:
            begun.insert(0, self.shelf.take(self.averaged(unit)))
        unit.arrived += 1
        self.finish()
        self.under_way = begun
        self.averaging = self.averaged(unit) if self.exchanges and self.shard_count > 1 and self.replicas > 1 else 0
        if self.size == 1:
            self.finish()

    def averaged(self, unit: _Unit) -> int:
        """Bytes in which a rank adds up its slice of the gradient, or of its shard, over the replicas."""
        slice_numel = -(-(unit.size.numel // self.shard_count) // self.replicas)
        return self.replicas * slice_numel * self.reduce_itemsize

    def finish(self) -> None:
        for place, buffer in enumerate(self.under_way):
            self.shelf.give(buffer)
            if place == 0 and self.averaging:
                self.shelf.give(self.shelf.take(self.averaging))
        self.under_way = []

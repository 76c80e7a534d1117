"""Computes the size of one rank's pool: replays a run's steps over sizes alone, with their buffers taken and returned.

Owns the bytes that a unit and its gradient take from the pool. `Uses`, `Backward` and `Reducer` decide here, as in a
run, which units have memory and which gradients are reduced; a test compares the result with a run. A unit is used once
a pass, in the order given. Every micro-batch has a gradient of every unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ..layout import round_up
from ..pool import Buffer, Shelf
from .backward import Backward
from .reducer import Reducer
from .residency import Residency
from .schedule import Forecast, Pass, Visit
from .stages import STAGES
from .uses import Uses

__all__ = ["Rehearsal", "UnitSize"]


@dataclass(frozen=True)
class UnitSize:
    """One unit: `numel` elements, padding included, of `itemsize` bytes.

    `encloses`: it is the model's own unit, in use from the first unit's turn to the last's. `depth`: how many others
    are in use around it, the nearest ones before it of a smaller depth. `numels`: elements of this rank's shard and of
    the longest one, where shards are not equal. `padding`: this rank has nothing else of it, and a store lends nothing.
    """

    numel: int
    itemsize: int
    trainable: bool = True
    encloses: bool = False
    depth: int = 0
    numels: tuple[int, int] | None = None
    padding: bool = False


@dataclass(frozen=True)
class Rehearsal:
    """Steps of `accumulate` micro-batches on one rank of shard_count x replicas.

    no_sync: all micro-batches but the last are inside `zero_core.no_sync`. lends: the number of gradients a step for
    which the store has memory (`gradient_buffer`); a store that only keeps sums apart has it for the first. gathers:
    units are gathered into the pool; False where they have memory of their own. exchanges: the ranks exchange slices
    and add them up, as on gloo; False: the backend reduces, as NCCL does.
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
        shelf = Shelf(lambda nbytes: None)
        units: Any = [_Unit(index, size, self, shelf) for index, size in enumerate(self.sizes)]
        ranks = SimpleNamespace(size=self.size, shard=SimpleNamespace(size=self.shard_count))
        store = SimpleNamespace(prefetch=lambda unit: None)
        context: Any = SimpleNamespace(ranks=ranks, store=store, swapping=None)
        row, ahead, stays = STAGES[self.stage], self.prefetch_bytes, self.resident_bytes
        uses = Uses(units, context, keeps=row.keeps_parameters, prefetch_bytes=ahead, resident_bytes=stays)
        reducer = Reducer(units, context, row, begin_update=None)
        of, order = _visits(units), list[int]()
        several = min(self.accumulate, 3)  # the fourth micro-batch, and any after it, takes as much as the third
        for _ in range(2):
            for micro in range(several):
                order = _forward(of, units, uses, order)
                with reducer.no_sync() if self.no_sync and micro + 1 < several else nullcontext(), torch.no_grad():
                    _backward(of, units, uses, reducer)
            uses.settle()
            reducer.reduce_kept()
            for unit in units:
                unit.gradient.arrived = 0
        return shelf.peak_nbytes

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.shard_count * self.replicas


def _visits(units: Sequence[_Unit]) -> Pass:
    root = Visit(0, tuple(unit.index for unit in units if unit.encloses))
    made = Pass(True, Forecast())
    open_ones = [root]
    for unit in units:
        if not unit.encloses:
            while len(open_ones) > 1 + unit.depth:
                made.visits.append(open_ones.pop())
            open_ones.append(Visit(1 + unit.index, (unit.index,), parent=open_ones[-1]))
    made.visits.extend(reversed(open_ones))
    return made


def _forward(of: Pass, units: Sequence[_Unit], uses: Uses, last: Sequence[int]) -> list[int]:
    """As the hooks of `Engine`. last: the order in which the last forward used the units. Returns this one's."""
    forecast = Forecast(last)
    open_ones: list[Visit] = []
    for visit in sorted(of.visits, key=lambda visit: visit.node):
        while open_ones and not open_ones[-1].encloses(visit):
            uses.release(open_ones.pop().units, turning=True)
        for u in visit.units:
            units[u].enter()
            forecast.used(u)
        uses.prefetch(forecast.upcoming())
        open_ones.append(visit)
    for visit in reversed(open_ones):
        uses.release(visit.units, turning=True, outermost=visit is of.visits[-1])
    return forecast.order


def _backward(of: Pass, units: Any, uses: Uses, reducer: Reducer) -> None:
    backward = Backward(units, uses, reducer, _nothing, partial=False)
    for visit in reversed(of.visits):
        backward.open(of, visit)
        for u in visit.units:
            units[u].gradient.collect()
    backward.finish()


def _nothing() -> None:
    """Autograd calls nothing at the end."""


class _Unit:
    """As much of a `unit.Unit` as `Uses`, `Backward` and `Reducer` ask for."""

    name, updating = "", False  # gathers go as far ahead as they do without a step before
    watch = SimpleNamespace(was_written=lambda: False, unseen_write=lambda: None)  # no forward writes

    def __init__(self, index: int, size: UnitSize, run: Rehearsal, shelf: Shelf) -> None:
        self.index, self.trainable, self.encloses, self.depth = index, size.trainable, size.encloses, size.depth
        self.nbytes = size.numel * size.itemsize
        self.gradient = _Gradient(size, run, shelf)
        self.residency, self.users = Residency.SHARDED, 0
        self._shelf, self._pooled = shelf, run.gathers and run.shard_count > 1
        self._memory: Buffer | None = None

    def prefetch(self) -> None:
        if self._pooled and self.residency is Residency.SHARDED:
            self._memory, self.residency = self._shelf.take(self.nbytes), Residency.UNSHARDING

    def foresee(self) -> None:
        """No store is asked."""

    def enter(self) -> None:
        self.prefetch()
        self.residency = Residency.UNSHARDED
        self.users += 1

    def leave(self) -> None:
        self.users -= 1

    def seal(self) -> None:
        self.users = 0

    def reshard(self) -> None:
        self.residency = Residency.SHARDED
        if self._memory is not None:
            self._shelf.give(self._memory)
            self._memory = None


class _Gradient:
    """As much of a `gradient.UnitGradient` as `Reducer` asks for. arrived: how many the store had of a step."""

    def __init__(self, size: UnitSize, run: Rehearsal, shelf: Shelf) -> None:
        self.numel, self.trainable, self.run, self.shelf = size.numel, size.trainable, run, shelf
        self.numels, self.padding = size.numels, size.padding
        self.current: list[Buffer] | None = None  # no buffer where the store lends memory
        self.kept: tuple[Buffer, int] | None = None  # and bytes of an element
        self.arrived = 0
        self._accumulates = False  # as in `UnitGradient`

    @property
    def owed(self) -> bool:
        return self.kept is not None

    def collect(self) -> None:
        if self.trainable:
            lent = self.run.size == 1 and self.arrived < self.run.lends
            self.current = [] if lent else [self.take(self.run.reduce_itemsize)]

    def take(self, itemsize: int) -> Buffer:
        return self.shelf.take(self.numel * itemsize)

    def forget_dropped(self) -> None:
        """None is."""

    def keep(self) -> None:
        assert self.current is not None
        (gradient,), self.current = self.current, None
        if self.kept is None and not (self._accumulates and self.run.reduce_itemsize != 4):
            self.kept = gradient, self.run.reduce_itemsize
            return
        if self.kept is None or self.kept[1] != 4:
            wide = self.take(4)
            if self.kept is not None:
                self.shelf.drop(self.kept[0])
            self.kept, self._accumulates = (wide, 4), True
        self.shelf.give(gradient)

    def reduce(self) -> _Reduction:
        if self.kept is not None:
            if self.current is not None:
                self.keep()
            (whole, itemsize), self.kept = self.kept, None
            if itemsize != self.run.reduce_itemsize:
                wide, whole = whole, self.take(self.run.reduce_itemsize)
                self.shelf.give(wide)
            self.current = [whole]
        begun, self.current = self.current or [], None
        made = _Reduction(self, begun)
        self.arrived += 1
        return made


class _Reduction:
    """As `gradient.Reduction`, with the buffers that collectives take from the pool meanwhile."""

    def __init__(self, of: _Gradient, begun: list[Buffer]) -> None:
        run, self.of = of.run, of
        shard_numel = of.numel // run.shard_count if of.numels is None else of.numels[0]
        averaged = round_up(shard_numel, run.replicas) * run.reduce_itemsize  # a rank adds its slice up there
        self._buffers, self._averaged_bytes = begun, 0
        if run.shard_count > 1:
            if of.arrived >= run.lends or of.padding:
                self._buffers = [of.shelf.take(shard_numel * run.reduce_itemsize), *self._buffers]
            if run.exchanges:
                taken = run.shard_count * shard_numel * run.reduce_itemsize
                self._buffers = [of.shelf.take(taken), *self._buffers]
                self._averaged_bytes = averaged if run.replicas > 1 else 0
        elif run.exchanges and run.replicas > 1:
            self._buffers = [of.shelf.take(averaged), *self._buffers]

    def finish(self) -> None:
        shelf = self.of.shelf
        for place, buffer in enumerate(self._buffers):
            shelf.give(buffer)
            if place == 0 and self._averaged_bytes:
                shelf.give(shelf.take(self._averaged_bytes))

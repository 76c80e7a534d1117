"""Computes the size of one rank's pool: replays a run's steps on meta tensors, with their buffers taken and returned.

Owns the bytes that a unit and a collective take from the pool. `Uses`, `Backward`, `Reducer` and `UnitGradient` decide
here, as in a run, which units have memory and which gradients are reduced; a test compares the result with a run. A
unit is used once a pass, in the order given. Every micro-batch has a gradient of every unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..gradients.reducer import Reducer
from ..hooks.backward_pass import Backward
from ..hooks.schedule import Forecast, Pass, Visit
from ..layout import round_up
from ..pool import Pool
from ..store import NullObserver
from ..unit_memory.residency_policy import STAGES, Uses
from ..unit_memory.unit_gradient import Leftover, UnitGradient
from ..unit_memory.unit_memory import Residency

_DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes of an element


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
        sizes, pool = tuple(self.sizes), Pool(torch.device("meta"))
        ranks, store = _Ranks(self, pool), _Store(self, sizes)
        context: Any = SimpleNamespace(ranks=ranks, store=store, pool=pool, observer=NullObserver(), may_give=True)
        units: Any = [_Unit(index, size, self, context) for index, size in enumerate(sizes)]
        row, ahead, stays = STAGES[self.stage], self.prefetch_bytes, self.resident_bytes
        uses = Uses(units, context, keeps=row.keeps_parameters, prefetch_bytes=ahead, resident_bytes=stays)
        reducer = Reducer(units, context, row, uses.writes, begin_update=None)
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
                unit.gradient.consumed(Leftover.NOTHING)
            store.arrived.clear()
        return pool.peak_nbytes

    def shard_numel(self, of: UnitSize) -> int:
        """Elements of this rank's shard of a unit."""
        return of.numel // self.shard_count if of.numels is None else of.numels[0]


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
    backward = Backward(uses, reducer, _nothing, partial=False)
    for visit in reversed(of.visits):
        backward.open(of, visit)
        for u in visit.units:
            if units[u].trainable:
                units[u].gradient.begun()
    backward.finish()


def _nothing() -> None:
    """Autograd calls nothing at the end."""


class _Ranks:
    """As much of `comm.ranks.Ranks` as gradients ask for: collectives take the pool's buffers, and move nothing."""

    def __init__(self, run: Rehearsal, pool: Pool) -> None:
        self.size, self._pool, self._exchanges = run.shard_count * run.replicas, pool, run.exchanges
        self.shard = SimpleNamespace(size=run.shard_count, rank=0)
        self.replicate = SimpleNamespace(size=run.replicas, rank=0)

    def reduce_scatter(self, part: Tensor, whole: Tensor, unit: str, *, rows: None) -> Tensor | None:
        return self._pool.take(self.shard.size * part.numel(), part.dtype) if self._exchanges else None

    def average_replicas(self, values: Tensor, unit: str) -> Tensor | None:
        numel = round_up(values.numel(), self.replicate.size)  # a rank adds its slice up there
        return self._pool.take(numel, values.dtype) if self._exchanges else None

    def wait(self, work: Tensor | None, collective: str, unit: str) -> None:
        if work is not None:
            self._pool.give(work)


class _Store:
    """As much of a `ShardStore` as gradients ask for. arrived: how many each unit had since the step."""

    swaps_in = False

    def __init__(self, run: Rehearsal, sizes: Sequence[UnitSize]) -> None:
        self._run, self._sizes = run, sizes
        self.arrived: Counter[int] = Counter()

    def gradient_buffer(self, i: int) -> Tensor | None:
        size, run = self._sizes[i], self._run
        if size.padding or self.arrived[i] >= run.lends:
            return None
        return torch.empty(run.shard_numel(size), dtype=_DTYPES[run.reduce_itemsize], device="meta")

    def accept_gradient(self, i: int, gradient: Tensor) -> None:
        self.arrived[i] += 1

    def prefetch(self, i: int) -> None:
        """No-op: a shard is not in the pool."""


class _Unit:
    """As much of a `unit.Unit` as `Uses`, `Backward` and `Reducer` ask for."""

    name, updating = "", False  # gathers go as far ahead as they do without a step before
    watch = SimpleNamespace(was_written=lambda: False, unseen_write=lambda: None)  # no forward writes

    def __init__(self, index: int, size: UnitSize, run: Rehearsal, context: Any) -> None:
        self.index, self.trainable, self.encloses, self.depth = index, size.trainable, size.encloses, size.depth
        self.nbytes = size.numel * size.itemsize
        part = run.shard_numel(size)
        layout: Any = SimpleNamespace(
            name="", numel=size.numel, slots=(), edges=tuple, numel_of=lambda rank: part, rows=lambda whole: None
        )
        memory: Any = SimpleNamespace(index=index, layout=layout, **vars(context))
        self.gradient = UnitGradient(memory, (), (), _DTYPES[run.reduce_itemsize])
        self.residency, self.users = Residency.SHARDED, 0
        self._pool, self._pooled = context.pool, run.gathers and run.shard_count > 1
        self._memory: Tensor | None = None

    def prefetch(self) -> None:
        if self._pooled and self.residency is Residency.SHARDED:
            self._memory, self.residency = self._pool.take(self.nbytes, torch.uint8), Residency.UNSHARDING

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
            self._pool.give(self._memory)
            self._memory = None

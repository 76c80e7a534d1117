"""Keeps the order of units in a step: forward's visits, backward's openings and closings, the next uses. No tensors.

Tells a durable store to commit each step on disk, as the forward after the step begins (`Commits`).

[Note: the order of collectives]
Forward completes children before their parent. Backward opens visits in reverse order of that completion, root first,
whether or not a rank's graph passes through them, so that all ranks call the same collectives in the same order:

    forward     root( a  b  c )                completed: a b c root
    backward    root  c  b  a                  opening b: gather b, close c (reduce c), prefetch a

A visit that encloses the one being opened stays open. A unit is reduced when the last of its visits closes.

[Note: the moment of a commit]
    step N returns     random state is noted: from here the next batch is drawn
    forward N+1        the rest is noted (scheduler, buffers, the caller's own), and the store begins to commit N
    backward N+1       on several ranks: waits until this rank has committed N, then takes part in the first reduction
    step N+1           waits until N is committed. On several ranks all have N: they took part in that reduction

A forward that records no gradients belongs to no step. So when a step returns, the one before it is on disk. Values of
step N are not written over on any rank before all ranks have N on disk. After any crash two ranks' last generations
differ by one at most, and both ranks have the smaller one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..errors import ZeroError
from ..store import ShardStore
from ..util.threads import Saving


@dataclass(eq=False)
class Visit:
    """One call of a unit's module in forward."""

    node: int
    units: tuple[int, ...]
    parent: Visit | None = None
    sequence: int = 0  # autograd's counter at the start: older outputs only pass through
    asks: bool = False  # autograd has saved a tensor over its units' memory

    def encloses(self, other: Visit) -> bool:
        ancestor = other.parent
        while ancestor is not None:
            if ancestor is self:
                return True
            ancestor = ancestor.parent
        return False


@dataclass(frozen=True, eq=False)
class Pass:
    """The visits of one outermost forward. grad: whether a backward may follow."""

    grad: bool
    forecast: Forecast
    thread: int = field(default_factory=threading.get_ident)
    stack: list[Visit] = field(default_factory=list)  # under way, outermost first
    visits: list[Visit] = field(default_factory=list)  # in order of completion
    external: list[int] = field(default_factory=list)  # units with a parameter used outside its module


class Progress:
    """The progress of a pass's backward. position: visits[position:] were opened. open: visits that are not closed."""

    def __init__(self, of: Pass) -> None:
        self.of, self.position = of, len(of.visits)
        self.open: list[Visit] = []
        self._places = {visit: place for place, visit in enumerate(of.visits)}
        self._first = {unit: self._places[visit] for visit in reversed(of.visits) for unit in visit.units}

    def place(self, visit: Visit) -> int:
        """Returns the visit's place in the order of completion; `position` for one that has not completed."""
        return self._places.get(visit, self.position)

    def pending(self, node: int, after: int) -> Visit | None:
        """Returns the visit of a module that backward reaches next, if it began after autograd's count `after`."""
        found = next((visit for visit in reversed(self.of.visits[: self.position]) if visit.node == node), None)
        return found if found is not None and found.sequence > after else None

    def path_to(self, visit: Visit | None) -> Iterator[Visit]:
        """Yields the visits to open, in order, up to `visit`, or all of the rest for None. Moves the position."""
        stop = 0 if visit is None else self.place(visit)
        while self.position > stop:
            self.position -= 1
            yield self.of.visits[self.position]

    def leave_for(self, visit: Visit | None) -> list[Visit]:
        """Returns the open visits that do not enclose `visit`, innermost first, and opens `visit`."""
        leaving = [v for v in reversed(self.open) if visit is None or not v.encloses(visit)]
        if visit is not None:
            self.open.append(visit)
        return leaving

    def close(self, visit: Visit) -> list[int]:
        """Closes the visit. Returns the units whose last visit this was."""
        self.open.remove(visit)
        open_units = {unit for other in self.open for unit in other.units}
        return [unit for unit in visit.units if self.position <= self._first[unit] and unit not in open_units]


class Forecast:
    """Guesses the units that come next, from the order of the last such pass. A wrong guess is never an error."""

    def __init__(self, last: Sequence[int] = ()) -> None:
        self._last, self._position = last, 0
        self._told: list[int] = []  # units known to come next, before all guessed ones
        self.order: list[int] = []  # units that this pass used, in the order of their uses

    def tell(self, units: Sequence[int]) -> None:
        """Notes units that are certainly used next, once. Guesses for other passes are not made from them."""
        self._told = list(units)

    def used(self, unit: int) -> None:
        """Notes the unit that is used now; finds its place in the last order again if the guess was wrong."""
        if unit in self._told:
            del self._told[: self._told.index(unit) + 1]
            return
        self.order.append(unit)
        with suppress(ValueError):  # a new unit: the guess for the next one still stands
            self._position = self._last.index(unit, self._position) + 1

    def upcoming(self) -> Sequence[int]:
        """Returns the units expected next, nearest first."""
        return [*self._told, *self._last[self._position :]] if self._told else self._last[self._position :]


class Orders:
    """The units that the last pass of each kind used, in order. A kind is an entry module, and training or not."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._of: dict[tuple[int, bool], list[int]] = {}

    def forecast(self, node: int, grad: bool) -> Forecast:
        return Forecast(self._of.get((node, grad), ()))

    def keep(self, node: int, of: Pass) -> None:
        """Keeps the order of a pass that is over, if it used any unit."""
        if of.forecast.order:
            self._of[node, of.grad] = of.forecast.order

    def next_use(self) -> list[int]:
        """Returns every unit, in the order in which the next forward will want it."""
        known = dict.fromkeys(max(self._of.values(), key=lambda order: len(set(order)), default=()))
        return [*known, *(u for u in range(self._units) if u not in known)]


class Commits:
    """The commits of one sharded model."""

    def __init__(self, store: ShardStore, *, several: bool) -> None:
        self._store, self._several = store, several
        self._run: tuple[Callable[[], Any], Callable[[Any], bytes], int] | None = None  # the arguments of `begin`
        self._pending: tuple[Any, int] | None = None  # the random state after the last step, and steps to commit
        self._copy: Saving | None = None

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._run is not None

    def begin(self, random_state: Callable[[], Any], blob_of: Callable[[Any], bytes], every: int = 1) -> None:
        """blob_of: packs a generation's values besides shards, given the result of `random_state` after its step.

        every: each `every`-th step is committed; the same on all ranks.
        """
        self._run = random_state, blob_of, every

    def stepped(self) -> None:
        """Notes that a step is over, except its updates in the background."""
        if self._run is not None:
            self._pending = self._run[0](), 1 + (0 if self._pending is None else self._pending[1])

    def begin_forward(self, *, last: bool = False) -> None:
        """Commits the step before, if there is one. last: whatever `every` is. Raises ZeroError before `begin`."""
        if self._run is None:
            raise ZeroError(
                "the store of this model is durable, and resume() was not called: call zero_core.resume(model, "
                "optimizer) after shard() and before the first forward"
            )
        _, blob_of, every = self._run
        if self._pending is not None and (last or self._pending[1] >= every):
            blob, self._pending = blob_of(self._pending[0]), None
            self._store.commit(blob)

    def begin_backward(self) -> None:
        """Waits on several ranks: no rank takes part in a reduction before it has committed the step before."""
        if self._several:
            self._store.committed()

    def begin_step(self) -> None:
        """Waits until the step before is committed."""
        self._store.committed()

    def finish(self) -> None:
        """Commits the last step, if that is still to do, and returns when it is on disk."""
        self.begin_forward(last=True)
        self._store.committed()

    def begin_copy(self, copy: Saving) -> None:
        """Registers a copy. There is one at a time: call `end_copy` before the next, and before the store is closed."""
        self._copy = copy

    def end_copy(self) -> None:
        """Returns when the last copy is over. Raises its error, unless its `wait` has raised it before."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.end()

"""The order of units in a step: what was visited, what to open and close in backward, what comes next. No tensors.

[Note: the order of collectives]
Forward completes children before their parent. Backward opens visits in reverse order of that completion, root first,
whether or not a rank's graph passes through them, so that all ranks call the same collectives in the same order:

    forward     root( a  b  c )                completed: a b c root
    backward    root  c  b  a                  opening b: gather b, close c (reduce c), prefetch a

A visit that encloses the one being opened stays open. A unit is reduced when the last of its visits closes.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Forecast", "Pass", "Visit"]


@dataclass(eq=False)
class Visit:
    """One call of a unit's module in forward. `index`: its place in the order of completion, -1 while it runs."""

    node: int
    units: tuple[int, ...]
    parent: Visit | None = None
    sequence: int = 0  # autograd's counter at the start: older outputs only pass through
    index: int = -1
    followed: bool = False  # a tensor of its inside is used after it

    def encloses(self, other: Visit) -> bool:
        ancestor = other.parent
        while ancestor is not None:
            if ancestor is self:
                return True
            ancestor = ancestor.parent
        return False


@dataclass(eq=False)
class Pass:
    """The visits of one outermost forward, and how far its backward has come."""

    grad: bool
    thread: int = field(default_factory=threading.get_ident)
    started: list[int] = field(default_factory=list)  # units, in order of use
    visits: list[Visit] = field(default_factory=list)  # in order of completion
    external: list[int] = field(default_factory=list)  # units with a parameter used outside its module
    position: int = 0  # visits[position:] were opened in this backward
    open: list[Visit] = field(default_factory=list)
    remaining: Counter[int] = field(default_factory=Counter)  # unit -> visits not closed yet

    def complete(self, visit: Visit) -> None:
        visit.index = len(self.visits)
        self.visits.append(visit)

    def begin_backward(self) -> None:
        self.position = len(self.visits)
        self.open.clear()
        self.remaining = Counter(unit for visit in self.visits for unit in visit.units)

    def pending(self, node: int, after: int) -> Visit | None:
        """The visit of a module that backward reaches next, if it began after autograd's count `after`."""
        found = next((visit for visit in reversed(self.visits[: self.position]) if visit.node == node), None)
        return found if found is not None and found.sequence > after else None

    def path_to(self, visit: Visit | None) -> list[Visit]:
        """Visits to open, in order, up to `visit`; all that are left for None. Moves the position."""
        target = 0 if visit is None else visit.index
        if target >= self.position:
            return []
        path = self.visits[target : self.position][::-1]
        self.position = target
        return path

    def leave_for(self, visit: Visit | None) -> list[Visit]:
        """Open visits that `visit` is not inside of, innermost first. They are not open any more."""
        closing = [v for v in reversed(self.open) if visit is None or not v.encloses(visit)]
        self.open = [v for v in self.open if v not in closing]
        return closing

    def closed(self, visit: Visit) -> list[int]:
        """Units whose last visit this was."""
        self.remaining.subtract(visit.units)
        return [unit for unit in visit.units if self.remaining[unit] == 0]


class Forecast:
    """Guesses the units that come next from the order of the last pass. A wrong guess is never an error."""

    def __init__(self) -> None:
        self._record: list[int] = []
        self._position = 0
        self.misses = 0

    @property
    def order(self) -> tuple[int, ...]:
        """Units in order of their first use in the last pass."""
        return tuple(dict.fromkeys(self._record))

    def begin(self) -> None:
        self._position = 0

    def used(self, unit: int) -> None:
        """Tell which unit is really used now; finds its place in the record again if the guess was wrong."""
        if self._position < len(self._record) and self._record[self._position] == unit:
            self._position += 1
            return
        if self._record:
            self.misses += 1
        try:
            self._position = self._record.index(unit, self._position) + 1
        except ValueError:
            return  # a new unit: the guess for the next one still stands

    def upcoming(self) -> list[int]:
        """Units expected next, nearest first."""
        return self._record[self._position :]

    def learn(self, started: list[int]) -> None:
        """The pass ended: its order is the next guess."""
        if started:
            self._record = list(started)

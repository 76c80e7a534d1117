"""Tracks one backward of a sharded model: its open visits, and the gradients that are complete when it closes them.

Owns the progress of the backward. Not here: autograd's entry points (in hooks.py), modules that run inside a backward
(in recompute.py), the way of a complete gradient (in reducer.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from .recompute import Recomputations
from .reducer import Reducer
from .schedule import Pass, Progress, Visit
from .unit import Unit
from .uses import Uses

__all__ = ["Backward"]


class Backward:
    """The backward under way. `end`: the callback that autograd calls at its end, and drops if the backward raises.

    task: autograd's number for it. partial: it runs inside a forward of the model, where no gradient is complete.
    """

    def __init__(
        self, units: Sequence[Unit], uses: Uses, reducer: Reducer, end: Callable[[], None], *, partial: bool
    ) -> None:
        self.task = torch._C._current_graph_task_id()
        self.inside = Recomputations(units, uses, reducer)
        self._units, self._uses, self._reducer, self._partial = units, uses, reducer, partial
        self._end = weakref.ref(end)
        self._last: tuple[int, Visit | None] = -1, None  # the backward that has opened a visit last, and the visit
        self._progress: dict[Pass, Progress] = {}  # of the passes that it has been through; it is in the last one

    @property
    def _current(self) -> Progress | None:
        return next(reversed(self._progress.values()), None)

    @property
    def raised(self) -> bool:
        """Whether it ended by an exception."""
        return self._end() is None

    @property
    def around(self) -> list[Visit]:
        """Calls that this backward runs, if the one that runs now is another, which such a call has started."""
        return [] if self.task == torch._C._current_graph_task_id() else self.inside.running

    def has_open(self, visit: Visit) -> bool:
        """Whether the visit is the one that was opened last, and by the backward that runs now."""
        task, last = self._last
        return last is visit and task == torch._C._current_graph_task_id() and not torch.is_grad_enabled()

    def reach(self, of: Pass | None, visit: Visit, passes: Sequence[Pass]) -> None:
        """A gradient reached the visit in this backward or in one inside of it: open it. of: as in `Engine._open`.
        passes: see `open_repeated`."""
        task = torch._C._current_graph_task_id()
        if of is None:
            self.inside.close(task, visit)
            self.open_repeated(passes, visit)
        elif self.task == task:
            self.open(of, visit)
        if of is None or self.task != task:
            self.inside.open(visit)
        self._last = task, visit

    def open(self, of: Pass, visit: Visit) -> None:
        """A gradient reached the visit: open it, and the visits that were skipped on the way, in order."""
        if torch.is_grad_enabled():
            self._uses.keep_all()  # create_graph=True: the graph holds parameters
        if self._current is None or self._current.of is not of:
            self._drain()
            self._progress[of] = self._progress.pop(of) if of in self._progress else Progress(of)
        progress = self._progress[of]
        if progress.place(visit) < progress.position:
            for each in progress.path_to(visit):
                self._open_one(progress, each)
        elif visit not in progress.open:  # closed already, and wanted again
            self._open_one(progress, visit)

    def open_repeated(self, passes: Sequence[Pass], visit: Visit) -> None:
        """Open the visit that `visit`, which was made inside of this backward, repeats. `passes`: where to look for it
        as long as this backward has entered no pass."""
        for of in list(self._progress)[-1:] or reversed(passes):
            repeated = (self._progress.get(of) or Progress(of)).pending(visit.node, self.inside.reached)
            if repeated is not None:
                return self.open(of, repeated)

    def _open_one(self, progress: Progress, visit: Visit) -> None:
        self._uses.hold(visit.units)
        self.inside.stop_lingering()
        for earlier in progress.leave_for(visit):
            self._close(progress, earlier)
        upcoming = (u for k in range(progress.place(visit) - 1, -1, -1) for u in progress.of.visits[k].units)
        self._uses.prefetch(upcoming)

    def _close(self, progress: Progress, visit: Visit) -> None:
        for u in visit.units:
            self._uses.leave(self._units[u])
        for u in progress.close(visit):
            if u not in progress.of.external and not self._partial:
                self._reducer.reduce_unit(self._units[u])
        for u in visit.units:
            self._uses.let_go(self._units[u])

    def _drain(self) -> None:
        """Visit the rest of the current pass."""
        if (current := self._current) is not None:
            for visit in current.path_to(None):
                self._open_one(current, visit)
            for visit in current.leave_for(None):
                self._close(current, visit)

    def finish(self) -> None:
        """Autograd is done: close open visits, make the skipped ones, reduce late gradients."""
        self._drain()
        for u in dict.fromkeys(reversed([u for of in self._progress for u in of.external])):
            self._reducer.reduce_unit(self._units[u])
        self._reducer.end_backward(partial=self._partial)
        self.inside.finish()

    def abandon(self) -> None:
        """The backward raised: drop its unfinished gradients. Reduced ones stay, as torch keeps p.grad."""
        self._reducer.finish()
        for unit in self._units:
            unit.gradient.drop_current()
            if unit.users and unit.residency.unsharded:
                unit.users = 1
                self._uses.leave(unit)  # torch keeps the writes of a recomputation before the error
            unit.seal()

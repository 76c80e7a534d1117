"""Tracks one backward of a sharded model: its open visits, and the gradients that are complete when it closes them.

Owns the progress of the backward, and visits of modules that run inside of it. Not here: autograd's entry points (in
engine.py), the way of a complete gradient (in gradients/reducer.py).

[Note: forward inside backward]
Checkpoints, adjoints, reversible blocks and tensor hooks run modules during backward, and our hooks with them. Such a
call has a visit of its own, which belongs to no pass. Its units stay gathered ("linger") until the next one is wanted.
Where a graph is made of it, autograd walks that graph in a backward inside of the backward, a graph task of its own. A
visit that is open there stays open until the task has left it or is done, whatever the outer backward opens and closes.

    outer task     root ... c opened ........................................ b opened, c closed
    inner task               └ call a b    b opened, a opened, b closed, done, a closed

An inner task never says that a gradient is complete: the outer one does, when it closes the last visit of the unit, or
at its end. A call that repeats a visit of the outer pass, as a checkpoint's does, opens that one as well. To be such a
repetition, the visit must have been made by the node that runs now, so its number must be later than the node's.
Whether a call is inside backward is asked of autograd, not remembered, because a backward that raised would leave a
wrong memory. Whether a backward has raised is seen by the callback that autograd holds as long as the backward lives.
Callers would not tell: autograd runs nodes on threads of its own, those of a device and those of deep nesting.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..errors import GradientError
from ..gradients.reducer import Reducer
from ..unit_memory.residency_policy import Uses
from ..unit_memory.unit_gradient import Leftover
from .attach_hooks import Node
from .schedule import Pass, Progress, Visit


class Backward:
    """The backward under way. `end`: the callback that autograd calls at its end, and drops if the backward raises.

    task: autograd's number for it. partial: it runs inside a forward of the model, where no gradient is complete.
    """

    def __init__(self, uses: Uses, reducer: Reducer, end: Callable[[], None], *, partial: bool) -> None:
        self.task = torch._C._current_graph_task_id()
        self.inside = Recomputations(uses, reducer)
        self._units, self._uses, self._reducer, self._partial = reducer.units, uses, reducer, partial
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
            self._units[u].gradient.given()
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


class Recomputations:
    """The calls inside of one backward, and the visits that backwards inside of it have open.

    reached: the sequence number of the outer backward's node that last ran a module; beyond any while none has.
    """

    def __init__(self, uses: Uses, reducer: Reducer) -> None:
        self._units, self._uses, self._reducer = reducer.units, uses, reducer
        self.running: list[Visit] = []  # calls under way, innermost last
        self._lingering: list[Visit] = []  # calls that are done, whose units linger
        self._open: dict[int, list[Visit]] = {}  # by autograd's number of the backward
        self.reached = sys.maxsize

    def begin(self, node: Node, *, outer: bool) -> None:
        """A module is called. outer: not from a backward inside of the one under way."""
        running = torch._C._current_autograd_node()
        if outer and running is not None:
            self.reached = running._sequence_nr()
        self._enter(node.units)
        self.stop_lingering()
        parent = self.running[-1] if self.running else None
        self.running.append(Visit(node.index, node.units, parent, torch._C._autograd._get_sequence_nr()))

    def end(self, node: Node) -> Visit | None:
        """The innermost unfinished call of the module is done, by return or by exception; its visit."""
        for visit in reversed(self.running):
            if visit.node == node.index:
                self.running.remove(visit)
                self._lingering.append(visit)
                return visit
        return None

    def open(self, visit: Visit) -> None:
        """A gradient reached an output of the visit in a backward inside of the one under way, the one that runs."""
        task = torch._C._current_graph_task_id()
        if torch.is_grad_enabled():
            self._uses.keep_all()  # as in `Backward.open`
        if task not in self._open:
            self._open[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(partial(self.close, task))
        if visit in self._open[task]:
            return
        self._enter(visit.units)
        self.stop_lingering()
        self.close(task, visit)
        self._open[task].append(visit)

    def close(self, task: int, wanted: Visit | None = None) -> None:
        """Close the open visits of an inner backward. Those that enclose the visit that it wants now, or are inside of
        it, stay: the two may have returned the same tensor. So do visits without a module's call."""
        held = self._open.get(task, [])
        kept = [] if wanted is None else [v for v in held if v.node < 0 or v.encloses(wanted) or wanted.encloses(v)]
        if task in self._open:
            self._open[task] = kept
        for visit in reversed(held):
            if visit not in kept:
                self._uses.release(visit.units)

    def _enter(self, units: Sequence[int]) -> None:
        """Units are used inside backward: with the values that the forward had, or not at all."""
        for unit in (self._units[u] for u in units if self._reducer.updates):
            if unit.gradient.stored or Leftover.UPDATED in unit.gradient.leftover:
                raise GradientError(
                    f"unit {unit.name!r} is used inside a backward that updates it, so this use could find other "
                    "values than the forward did. Leave update_in_backward out"
                )
        self._uses.hold(units)

    def stop_lingering(self) -> None:
        """Units of the calls that are done linger no longer."""
        stopped, self._lingering = self._lingering, []
        for visit in stopped:
            self._uses.release(visit.units)

    def finish(self) -> None:
        """The outer backward is done. An inner one that still has visits open has raised, and the error was caught."""
        self._lingering += self.running
        self.stop_lingering()
        for task in self._open:
            self.close(task)

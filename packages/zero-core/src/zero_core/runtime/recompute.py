"""Gives units to modules that are called inside a backward, and to backwards inside of it, and takes them back.

Owns the visits that belong to no pass. Not here: the visits of the outer backward (in backward.py).

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
from collections.abc import Sequence
from functools import partial

import torch

from ..errors import GradientError
from .attaching import Node
from .gradient import Leftover
from .reducer import Reducer
from .schedule import Visit
from .unit import Unit
from .uses import Uses

__all__ = ["Recomputations"]


class Recomputations:
    """The calls inside of one backward, and the visits that backwards inside of it have open.

    reached: the sequence number of the outer backward's node that last ran a module; beyond any while none has.
    """

    def __init__(self, units: Sequence[Unit], uses: Uses, reducer: Reducer) -> None:
        self._units, self._uses, self._reducer = units, uses, reducer
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
                    f"unit {unit.name!r} is used inside a backward that has updated it, or is about to, so the use "
                    "would find other values than the forward did. Leave update_in_backward out"
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

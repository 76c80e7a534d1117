"""Modules called inside backward: which unit's memory lingers after them, and until when. Knows no engine.

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
wrong memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from .schedule import Visit

__all__ = ["Recomputations"]


@dataclass(eq=False)
class _Call:
    """One such call, which is under way or whose units linger."""

    visit: Visit
    done: bool = False


class Recomputations:
    """The calls whose units are in use or still linger."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def begin(self, node: int, units: tuple[int, ...], sequence: int) -> None:
        """sequence: autograd's counter at the start of the call."""
        parent = next((call.visit for call in reversed(self._calls) if not call.done), None)
        self._calls.append(_Call(Visit(node, units, parent, sequence)))

    def end(self, node: int) -> Visit | None:
        """The innermost unfinished call of the module is done, by return or by exception; its visit."""
        for call in reversed(self._calls):
            if call.visit.node == node and not call.done:
                call.done = True
                return call.visit
        return None

    def stop(self, everything: bool) -> list[int]:
        """Units of the calls that are done (or of all), which linger no longer."""
        stopped = [call for call in self._calls if call.done or everything]
        self._calls = [call for call in self._calls if call not in stopped]
        return [unit for call in stopped for unit in call.visit.units]

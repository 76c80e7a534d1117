"""Where a unit's complete gradient goes: kept on this rank, or reduced into the store, one reduction at a time.

Owns that decision and the dropping of gradients. When a gradient is complete is `hooks`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..comm.ranks import Ranks
from ..store import ShardStore
from .gradient import Reduction
from .unit import Unit

__all__ = ["Reducer"]


class Reducer:
    """The gradients of one sharded model. keeps: whole gradients stay until the step (stage 1)."""

    def __init__(self, units: Sequence[Unit], ranks: Ranks, store: ShardStore, *, keeps: bool) -> None:
        self._units, self._ranks, self._store, self._keeps = units, ranks, store, keeps
        self._under_way: Reduction | None = None
        self.synchronising = True  # False inside no_sync
        self.update: Callable[[Unit], Callable[[], None]] | None = None  # update_in_backward, see `_accept`
        self._updating: Callable[[], None] | None = None

    def retire(self, unit: Unit) -> None:
        """This backward's gradient of the unit is complete."""
        if not unit.trainable:
            return
        if self._ranks.size > 1 and (self._keeps or not self.synchronising):
            unit.gradient.keep()
        else:
            self._reduce(unit)

    def retire_late(self, unit: Unit) -> None:
        """A gradient reached the unit after this backward had reduced it, perhaps on this rank only.

        Several ranks agree on it at the step: `late` and `reduce_late`.
        """
        if self._ranks.size == 1:
            self._reduce(unit)
        elif unit.gradient.current is not None:
            unit.gradient.keep(late=True)

    def late(self) -> list[bool]:
        """For each unit, whether this rank keeps a late gradient."""
        return [unit.gradient.late for unit in self._units]

    def reduce_late(self, wanted: Sequence[bool]) -> None:
        """Reduce the units which any rank says are late."""
        for unit in reversed(self._units):
            if wanted[unit.index]:
                self._reduce(unit)
        self.finish()

    def _reduce(self, unit: Unit) -> None:
        if self._ranks.size == 1 and unit.gradient.current is None:
            return
        if self._under_way is not None and self._under_way.of is unit.gradient:
            self.finish()  # a second reduction of it would begin in the memory that the first one still uses
        reduction = unit.gradient.reduce()
        if self.update is not None:
            reduction.update = self.update(unit)
        self._accept()
        self._under_way = reduction
        if self._ranks.size == 1:
            self._accept()

    def finish(self) -> None:
        """Wait for the reduction under way, if there is one, and for what is to be updated in backward."""
        self._accept()
        self._update()

    def _accept(self) -> None:
        """Hand what is under way to the store.

        With update_in_backward the unit is then updated: what an update waits for was begun with the reduction. Where
        the store's memory of gradients is on the host (a device apart), the update comes a unit later, so that the
        host waits for a gradient's way down while the device has the next unit's backward to compute.
        """
        if self._under_way is None:
            return
        self._update()  # before the store has another gradient: the norm is of what it has
        reduction, self._under_way = self._under_way, None
        reduction.finish()
        self._updating = reduction.update
        if not getattr(self._store, "swaps_in", False):
            self._update()

    def _update(self) -> None:
        update, self._updating = self._updating, None
        if update is not None:
            update()

    def reduce_kept(self) -> None:
        """Reduce what stage 1 and no_sync kept, in the order of backward; forget what was dropped."""
        for unit in reversed(self._units):
            unit.gradient.forget_dropped()
            if unit.gradient.owing:
                self._reduce(unit)
        self.finish()

    def discard(self, leftover: str = "") -> None:
        """Forget every gradient. leftover: see `UnitGradient.consumed`."""
        self._updating = None
        for unit in self._units:
            unit.gradient.drop_current()
            unit.gradient.drop_kept()
            unit.gradient.consumed(leftover)
        self._store.discard_gradients()

    def drop(self, unit: Unit, k: int) -> bool:
        """Drop one parameter's gradient; whether any is left."""
        gradient = unit.gradient
        if gradient.leftover[k] and not (gradient.used[k] or gradient.arrived):
            gradient.leftover[k] = ""  # the step has consumed it: nothing of it is left to discard
            return True
        gradient.drop(k)
        # the unit first: it answers at once while its others are held, so zero_grad() over n parameters is not n * n
        return any(each.gradient.holds(j) for each in (unit, *self._units) for j in range(len(each.parameters)))

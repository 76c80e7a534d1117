"""Gathers units before their uses, and keeps them unsharded or reshards them after, with the writes of a use.

Owns which units have memory, and for how long. Not here: which unit is used next (in hooks.py), how memory moves (in
residency.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .context import UnitContext
from .outputs import outside_transforms
from .residency import Residency
from .residents import Residents, Turn
from .unit import Unit
from .writes import Writes

__all__ = ["Uses"]


class Uses:
    """The uses of the units of one sharded model.

    keeps: memory stays between uses (stages 0 to 2). prefetch_bytes: most bytes of units that are gathered ahead of
    their use. resident_bytes: most bytes of units that stay unsharded though nothing uses them.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        context: UnitContext,
        *,
        keeps: bool,
        prefetch_bytes: int,
        resident_bytes: int,
    ) -> None:
        self._units, self._ranks = units, context.ranks
        self._keeps = keeps
        self.keeping = keeps
        self._residents, self.turn = Residents(resident_bytes), Turn(prefetch_bytes)
        self.writes = Writes(context.ranks)

    def keep_all(self) -> None:
        """Makes units that have memory keep it until the step, also at stage 3: a graph holds parameters."""
        self.keeping = True

    def prefetch(self, upcoming: Iterable[int]) -> None:
        """Starts the next units, as many as the bytes allow, one at least; the store prefetches one more.

        On several ranks, a gather ahead first waits for the unit's own update. Ranks finish updates at different times,
        so ranks that decided by this would call gathers in different orders. So only one unit at a time that a step has
        changed is gathered ahead: computation waits for one update more than it needs, not for all that the bytes
        allow.
        """
        left, self.turn.spare_bytes = self.turn.prefetch_bytes, 0
        updating = False
        for u in upcoming:
            unit = self._units[u]
            if unit.residency.unsharded:
                if self.keeping:
                    return  # a pass since the step has gathered it, and the units after it
                left -= self.turn.ahead_bytes(unit)
                continue
            enough = left <= 0 or (left < unit.nbytes and left < self.turn.prefetch_bytes)
            if enough or (updating and unit.updating and self._ranks.shard.size > 1):
                if self.turn.prefetch_bytes > 0:
                    unit.foresee()
                return
            left -= unit.nbytes
            updating |= unit.updating
            unit.prefetch()
        self.turn.spare_bytes = left

    def hold(self, units: Iterable[int]) -> None:
        """Keeps units that are unsharded, or may be, as they are until `release`."""
        for u in units:
            self._units[u].enter()

    def release(self, units: Iterable[int], **how: bool) -> None:
        """Ends one use of each. A failed forward or backward has given up units without a use. how: see `let_go`."""
        for u in units:
            if self._units[u].users:
                self.leave(self._units[u])
            self.let_go(self._units[u], **how)

    @outside_transforms
    def leave(self, unit: Unit) -> None:
        """Ends one visit of the unit. Writes into its parameters are kept, or refused at the step."""
        written = unit.users == 1 and unit.watch.was_written()
        if unit.users == 1 and not written:
            self.writes.unseen(unit.name, unit.watch.unseen_write())
        unit.leave()
        if written:
            with torch.no_grad():
                self.writes.note(unit.name, unit.flat)
                unit.keep_written()
                if self.keeping and unit.residency is Residency.SHARDED:
                    unit.unshard(copy=True)

    @outside_transforms
    def let_go(self, unit: Unit, *, evict: bool = True, turning: bool = False, outermost: bool = False) -> None:
        """Reshards a unit that nothing uses at stage 3, unless it is used again soon.

        evict: False in a pass without a backward, see `residents`. turning: it was used in a forward that a backward
        may follow. outermost: by the module that was called first.
        """
        if unit.users == 0 and not self.keeping and unit.residency is not Residency.SHARDED:
            self.turn.pop(unit, None)
            for evicted in self._residents.admit(unit, evict=evict):
                stays = turning and evicted.residency is not Residency.LENT  # memory that the store lends is no copy
                for leaving in self.turn.admit(evicted, outermost=outermost) if stays else [evicted]:
                    if leaving.users == 0:
                        leaving.reshard()

    def let_all_go(self, *, turning: bool = False) -> None:
        """Reshards units that were gathered ahead and not used. Residents stay, and if `turning` also the units that a
        backward uses first."""
        if self.keeping:
            return
        if not turning:
            self.turn.clear()
        for unit in self._units:
            stays = unit in self._residents or unit in self.turn
            if unit.residency is not Residency.SHARDED and unit.users == 0 and not stays:
                unit.reshard()

    def settle(self) -> None:
        """Ends all uses of all units, and takes their memory away."""
        self.forget()
        for unit in self._units:
            unit.seal()
            unit.reshard()

    def forget(self) -> None:
        """Forgets which units stay unsharded."""
        self._residents.clear()
        self.turn.clear()
        self.keeping = self._keeps

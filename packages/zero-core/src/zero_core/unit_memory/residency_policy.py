"""Decides when a unit is gathered, and whether it stays unsharded after a use or is resharded. Lists ZeRO's stages.

Owns which units have memory, and for how long, and copies of single parameters for uses outside of their unit's module
and for a state dict. Not here: which unit is used next (in hooks/engine.py), how memory moves (in unit_memory.py).

[Note: the farthest next use]
Forward uses units 0..n, backward n..0, the next forward 0..n again. So among the units that were used, the one used
longest ago is needed last: evict it. Passes without a backward only repeat 0..n: there the unit used last is needed
last, so nothing is evicted for it.

[Note: where forward turns into backward]
Backward begins with the units that forward used last, so these stay in between. Near the end of a forward fewer units
remain to be gathered ahead, and these units use the rest of `prefetch_bytes`. In backward they count as gathered ahead.
The outermost unit, which is in use all along a forward and a backward, stays beside them. So the most bytes that are
unsharded at once do not grow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..active_calls import Calls, mended, outside_transforms
from ..tensors.version_counters import Stamp
from .unit import Unit
from .unit_memory import Residency, UnitContext
from .write_checks import Writes


@dataclass(frozen=True)
class StageRow:
    """The unsharded values that a stage keeps between uses. Stages differ in the first three facts alone."""

    sharded: bool  # optimizer states (and with them the store's shards) are cut over the ranks
    keeps_parameters: bool  # unsharded parameters stay from their first use until the step
    keeps_gradients: bool  # unsharded gradients stay until the step, instead of being reduced in backward
    everywhere: bool = False  # every rank gathers and reduces every unit, whichever it runs: find_unused_parameters


STAGES = {
    0: StageRow(sharded=False, keeps_parameters=True, keeps_gradients=False),
    1: StageRow(sharded=True, keeps_parameters=True, keeps_gradients=True),
    2: StageRow(sharded=True, keeps_parameters=True, keeps_gradients=False),
    3: StageRow(sharded=True, keeps_parameters=False, keeps_gradients=False),
}


class Held(dict[Unit, int]):
    """Units that stay unsharded though nothing uses them, in the order of their last use, and the bytes of each."""

    def leave_room(self, room_bytes: int, *, alone: bool = False) -> list[Unit]:
        """Takes units out, the one used longest ago first, until the bytes fit. alone: one may stay, however large."""
        used_bytes, leaving = sum(self.values()), []
        for oldest, nbytes in list(self.items()):
            if used_bytes <= room_bytes or (alone and used_bytes == nbytes):
                break
            if nbytes:
                del self[oldest]
                used_bytes -= nbytes
                leaving.append(oldest)
        return leaving


class Residents(Held):
    """Those that stay from any use to the next."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes

    def admit(self, unit: Unit, *, evict: bool) -> list[Unit]:
        """Admits a unit after a use, when it is free. Returns the units to reshard, itself if it does not fit."""
        self.pop(unit, None)
        if unit.nbytes > self.budget_bytes - (0 if evict else sum(self.values())):
            return [unit]
        self[unit] = unit.nbytes
        return self.leave_room(self.budget_bytes)


class Turn(Held):
    """Those that stay from a forward to its backward. spare_bytes: the rest of `prefetch_bytes` beside the units that
    are gathered ahead."""

    def __init__(self, prefetch_bytes: int) -> None:
        super().__init__()
        self.prefetch_bytes, self.spare_bytes = prefetch_bytes, 0

    def admit(self, unit: Unit, *, outermost: bool) -> list[Unit]:
        """Admits a unit after its use in a forward, when it is free. Returns the units to reshard. One may stay,
        however large it is."""
        if self.prefetch_bytes == 0:
            return [unit]
        self[unit] = 0 if outermost else unit.nbytes
        return self.leave_room(self.spare_bytes, alone=self.spare_bytes == self.prefetch_bytes)


class Uses:
    """The uses of the units of one sharded model.

    keeps: memory stays between uses (stages 0 to 2). prefetch_bytes: most bytes of units that are gathered ahead of
    their use. resident_bytes: most bytes of units that stay unsharded though nothing uses them.
    """

    def __init__(
        self, units: Sequence[Unit], context: UnitContext, *, keeps: bool, prefetch_bytes: int, resident_bytes: int
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
                left -= 0 if unit.users else self.turn.get(unit, 0)
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
                self._units[u].gradient.given()
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

        evict: False in a pass without a backward, see [Note: the farthest next use]. turning: it was used in a forward
        that a backward may follow. outermost: by the module that was called first.
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


class Copies:
    """Copies of the parameters of one sharded model."""

    def __init__(self, units: Sequence[Unit], uses: Uses, calls: Calls) -> None:
        self._units, self._uses, self.calls = units, uses, calls
        self.taken: dict[tuple[int, int], tuple[Stamp, Tensor]] = {}  # (unit, k) -> their stamp, values

    @outside_transforms
    def full(self, unit: Unit, k: int) -> Tensor:
        """Returns parameter k of the unit, whole. Collective. Never an inference tensor, whose writes go uncounted."""
        known = self.taken.get((unit.index, k))
        return known[1] if known is not None and known[0].current() else self._copy(unit, [k])[0]

    @outside_transforms
    def take(self, wanted: Mapping[int, Sequence[int]]) -> None:
        """Copies these parameters of these units for `full`, until `taken` is cleared. Collective."""
        for u in sorted(wanted):
            unit = self._units[u]
            for k, values in zip(wanted[u], self._copy(unit, wanted[u]), strict=True):
                self.taken[u, k] = Stamp([unit.versions[k]]), values

    @mended
    def _copy(self, unit: Unit, indices: Sequence[int]) -> list[Tensor]:
        self.calls.refuse_others(f"access to {unit.layout.slots[indices[0]].name}")
        with torch.no_grad():
            unit.unshard()
            values = [unit.views[k].clone() for k in indices]
        self._uses.let_go(unit)
        return values

    @outside_transforms
    def write(self, unit: Unit, k: int, values: Tensor, uncounted: Tensor | None, *, changed: bool = False) -> None:
        """Writes new whole values of parameter k: this rank's part goes to the store. uncounted: see `Version.wrote`.
        changed: see `Unit.write_part`.

        If a visit of the unit is open, they go to the memory that it reads, and are kept when it ends.
        """
        if unit.users:
            unit.views[k].copy_(values.detach())
            increment_version(unit.parameters[k])  # a view is written below autograd, where nothing is counted
            return
        unit.reshard()
        unit.versions[k].ended(uncounted)
        flat = values.detach().reshape(-1)
        self._uses.writes.note(unit.layout.slots[k].name, flat)
        unit.write_part("master", k, flat, changed=changed)

"""Which units stay unsharded between uses, within a budget of bytes. Decides; `uses` reshards.

[Note: the farthest next use]
Forward uses units 0..n, backward n..0, the next forward 0..n again. So among the units that were used, the one used
longest ago is the one wanted last: evict it. Passes without a backward only repeat 0..n: there the next use of what was
used last is farthest, so nothing is evicted for it.

[Note: where forward turns into backward]
Backward begins with the units that forward used last, so these stay in between. Near the end of a forward less and
less is left to gather ahead, and what `prefetch_bytes` has to spare then is theirs. In backward they count as gathered
ahead. The outermost unit, which is in use all along a forward and a backward, stays beside them. So none of this raises
the most bytes that are unsharded at once.
"""

from __future__ import annotations

from .unit import Unit

__all__ = ["Residents", "Turn"]


class Residents:
    """Units whose memory stays though nothing uses them, in the order of their last use."""

    def __init__(self, budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self._kept: dict[Unit, None] = {}

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._kept

    def admit(self, unit: Unit, *, evict: bool) -> list[Unit]:
        """The unit was used and is free: returns those to reshard, itself included where it does not fit."""
        self._kept.pop(unit, None)
        used_bytes = sum(each.nbytes for each in self._kept)
        leaving = []
        if unit.nbytes > self.budget_bytes or (not evict and used_bytes + unit.nbytes > self.budget_bytes):
            return [unit]
        for oldest in list(self._kept):
            if used_bytes + unit.nbytes <= self.budget_bytes:
                break
            del self._kept[oldest]
            used_bytes -= oldest.nbytes
            leaving.append(oldest)
        self._kept[unit] = None
        return leaving

    def clear(self) -> None:
        self._kept.clear()


class Turn:
    """Units that stay from a forward to its backward, in the order of their last use.

    spare_bytes: what the units that are gathered ahead leave of the budget.
    """

    def __init__(self, prefetch_bytes: int) -> None:
        self.prefetch_bytes, self.spare_bytes = prefetch_bytes, 0
        self._kept: dict[Unit, int] = {}  # and the bytes that each takes of the spare ones

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._kept

    def ahead_bytes(self, unit: Unit) -> int:
        """What counts as gathered ahead of the unit, which has memory."""
        return 0 if unit.users else self._kept.get(unit, 0)

    def admit(self, unit: Unit, *, outermost: bool) -> list[Unit]:
        """The unit was used in a forward and is free: returns those to reshard. One may stay, however large it is."""
        if self.prefetch_bytes == 0:
            return [unit]
        self._kept[unit] = 0 if outermost else unit.nbytes
        used_bytes, leaving = sum(self._kept.values()), []
        for oldest, nbytes in list(self._kept.items()):
            alone = used_bytes == nbytes and self.spare_bytes == self.prefetch_bytes
            if used_bytes <= self.spare_bytes or alone:
                break
            if nbytes:
                del self._kept[oldest]
                used_bytes -= nbytes
                leaving.append(oldest)
        return leaving

    def discard(self, unit: Unit) -> None:
        self._kept.pop(unit, None)

    def clear(self) -> None:
        self._kept.clear()

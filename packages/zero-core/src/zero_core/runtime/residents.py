"""Decides which units stay unsharded between uses, within a budget of bytes. Not here: resharding (in uses.py).

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

from .unit import Unit

__all__ = ["Residents", "Turn"]


class Residents(dict[Unit, int]):
    """Units that stay from any use to the next, in the order of their last use, and the bytes of each."""

    def __init__(self, budget_bytes: int = 0) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes

    def admit(self, unit: Unit, *, evict: bool) -> list[Unit]:
        """Admits a unit after a use, when it is free. Returns the units to reshard, itself if it does not fit."""
        self.pop(unit, None)
        used_bytes = sum(self.values())
        leaving = []
        if unit.nbytes > self.budget_bytes or (not evict and used_bytes + unit.nbytes > self.budget_bytes):
            return [unit]
        for oldest, nbytes in list(self.items()):
            if used_bytes + unit.nbytes <= self.budget_bytes:
                break
            del self[oldest]
            used_bytes -= nbytes
            leaving.append(oldest)
        self[unit] = unit.nbytes
        return leaving


class Turn(dict[Unit, int]):
    """Units that stay from a forward to its backward, in the order of their last use, and the bytes of each.

    spare_bytes: the rest of `prefetch_bytes` beside the units that are gathered ahead.
    """

    def __init__(self, prefetch_bytes: int) -> None:
        super().__init__()
        self.prefetch_bytes, self.spare_bytes = prefetch_bytes, 0

    def ahead_bytes(self, unit: Unit) -> int:
        """Returns the bytes of a unit with memory that count as gathered ahead."""
        return 0 if unit.users else self.get(unit, 0)

    def admit(self, unit: Unit, *, outermost: bool) -> list[Unit]:
        """Admits a unit after its use in a forward, when it is free. Returns the units to reshard. One may stay,
        however large it is."""
        if self.prefetch_bytes == 0:
            return [unit]
        self[unit] = 0 if outermost else unit.nbytes
        used_bytes, leaving = sum(self.values()), []
        for oldest, nbytes in list(self.items()):
            alone = used_bytes == nbytes and self.spare_bytes == self.prefetch_bytes
            if used_bytes <= self.spare_bytes or alone:
                break
            if nbytes:
                del self[oldest]
                used_bytes -= nbytes
                leaving.append(oldest)
        return leaving

"""Which units stay unsharded between uses, within a budget of bytes. Decides; `uses` reshards.

[Note: the farthest next use]
Forward uses units 0..n, backward n..0, the next forward 0..n again. So among the units that were used, the one used
longest ago is the one wanted last: evict it. Passes without a backward only repeat 0..n: there the next use of what was
used last is farthest, so nothing is evicted for it.
"""

from __future__ import annotations

from .unit import Unit

__all__ = ["Residents"]


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

"""Predicts the order in which units will be updated from the last updates.

Not here: who is evicted (in memory/slots.py).
"""

from __future__ import annotations

from collections.abc import Sequence


class Order:
    """`units`: the units of the coming updates, soonest first, as in the last ones. Empty until the first update."""

    def __init__(self) -> None:
        self.units: list[int] = []

    def learn(self, updated: Sequence[int], of: int) -> None:
        """Called when an update of the units `updated`, out of `of` units, begins.

        Predicts the same order again; where units are updated one by one, the units that followed this one last time.
        """
        if len(updated) != 1 or of == 1:
            self.units = list(updated)
        elif updated[0] in self.units:
            at = self.units.index(updated[0])
            self.units = [*self.units[at + 1 :], *self.units[: at + 1]]
        else:
            self.units = [*self.units, updated[0]]

    def position(self, unit: int) -> int:
        """The unit's position among the coming updates; its position in the model before any update."""
        return self.units.index(unit) if unit in self.units else unit

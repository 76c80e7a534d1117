"""In which order units will be updated. Owns what the last updates have shown; who is evicted then is `slots`'."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Order"]


class Order:
    """`units`: those of the updates to come, soonest first, as the last ones went. Empty until the first update."""

    def __init__(self) -> None:
        self.units: list[int] = []

    def learn(self, updated: Sequence[int], of: int) -> None:
        """An update of these units, of so many, began: this order comes again, or, unit by unit, what followed this
        unit last time."""
        if len(updated) != 1 or of == 1:
            self.units = list(updated)
        elif updated[0] in self.units:
            at = self.units.index(updated[0])
            self.units = [*self.units[at + 1 :], *self.units[: at + 1]]
        else:
            self.units = [*self.units, updated[0]]

    def position(self, unit: int) -> int:
        """When the unit comes, counted in units; before any update, in the order of the model."""
        return self.units.index(unit) if unit in self.units else unit

"""Copies whole values of single parameters for uses outside of their unit's module, and writes them back.

Owns the copies for a state dict. Not here: which parameters are wanted (in place.py and snapshots.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from .calls import Calls, mended
from .outputs import outside_transforms
from .unit import Unit
from .uses import Uses
from .versions import Stamp

__all__ = ["Copies"]


class Copies:
    """Copies of the parameters of one sharded model."""

    def __init__(self, units: Sequence[Unit], uses: Uses, calls: Calls) -> None:
        self._units, self._uses, self.calls = units, uses, calls
        self.taken: dict[tuple[int, int], tuple[Stamp, Tensor]] = {}  # (unit, k) -> their stamp, values

    @outside_transforms
    def full(self, unit: Unit, k: int) -> Tensor:
        """Returns parameter k of the unit, whole. Collective. Never an inference tensor, whose writes go uncounted."""
        known = self.taken.get((unit.index, k))
        if known is not None and known[0].current():
            return known[1]
        return self._copy(unit, [k])[0]

    @outside_transforms
    def take(self, wanted: Mapping[int, Sequence[int]]) -> None:
        """Copies these parameters of these units for `full`, until `taken` is cleared. Collective."""
        for u in sorted(wanted):
            unit = self._units[u]
            for k, values in zip(wanted[u], self._copy(unit, wanted[u]), strict=True):
                self.taken[u, k] = Stamp([unit.versions[k]]), values

    @mended
    def _copy(self, unit: Unit, indices: Sequence[int]) -> list[Tensor]:
        self.calls.refuse_others(f"a use of {unit.layout.slots[indices[0]].name}")
        with torch.no_grad():
            unit.unshard()
            values = [unit.views[k].clone() for k in indices]
        self._uses.let_go(unit)
        return values

    @outside_transforms
    def write(self, unit: Unit, k: int, values: Tensor, uncounted: Tensor | None) -> None:
        """Writes new whole values of parameter k: this rank's part goes to the store. uncounted: see `Version.wrote`.

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
        unit.write_part("master", k, flat)

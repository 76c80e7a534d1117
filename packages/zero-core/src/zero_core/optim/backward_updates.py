"""Updates units during backward (update_in_backward): each one before the store gets the next unit's gradient.

Owns the list of parameters updated since the last step, and their gradient norm. Not here: when a gradient is complete
(in hooks/backward_pass.py), and its reduction (in gradients/reducer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..device import later
from ..errors import GradientError
from ..unit_memory.unit import Unit
from ..unit_memory.unit_gradient import Leftover
from ..unit_memory.unit_memory import UnitContext
from .contracts import frozen
from .state_names import Options


class UpdatesInBackward:
    """Updates units one by one, with the options that `param_groups` have then."""

    def __init__(self, units: Sequence[Unit], context: UnitContext, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self._units, self._ranks, self._store, self._param_groups = units, context.ranks, context.store, param_groups
        self.options: Options | None = None  # once there is an optimizer of these
        self._updated: dict[int, list[int]] = {}  # units, and which parameters, since the last step
        self._squared = context.ranks.numbers([0.0])[0]  # () float64, device: of the gradients of these

    def begin(self, unit: Unit) -> Callable[[], None]:
        """Call it when the unit's reduction has begun. Returns the update, to call once the store has the gradient.

        Collective on several ranks: the host has to know which parameters to skip. The exchange is begun here and read
        there, about a unit later, so that the host waits for no kernel that was queued since.
        """
        flags = None
        if self._ranks.size > 1:
            mine = self._ranks.numbers([float(flag) for flag in unit.gradient.used])
            flags = later(self._ranks.sum_everywhere(mine, f"what is used of {unit.name}"))
        return partial(self._update, unit, flags)

    @torch.no_grad()
    def _update(self, unit: Unit, flags: Callable[[], list[float]] | None) -> None:
        if unit.index in self._updated:
            raise GradientError(
                f"a gradient reached unit {unit.name!r}, which backward has updated since the last step(): backward() "
                "ran twice, or a parameter was used outside its module. Leave update_in_backward out of zero_core.shard"
            )
        if not self._updated and self.options is not None:
            self.options.check()
        self._updated[unit.index] = []
        if flags is not None:
            unit.gradient.used = [flag > 0 for flag in flags()]
        self._squared = self._squared + self._store.gradient_norm_squared()
        self._updated[unit.index] = unit.stepped()
        unit.reshard()
        unit.changed()
        steps = [each.count_step(Leftover.UPDATED) if each is unit else [0] * len(each.pieces) for each in self._units]
        self._store.update(frozen(self._param_groups), 1.0, [unit.index], steps)

    def squared(self) -> Tensor:
        """() float64, device: the sum of this rank's squared gradients that were updated since the last step."""
        return self._squared

    def finish(self) -> None:
        """At the step: autograd counts the parameters as changed. Not before: a use outside the module might come."""
        for index, ks in self._updated.items():
            for k in ks:
                self._units[index].overwritten(k)
        for unit in self._units:
            for k in unit.gradient.left(Leftover.UPDATED):
                unit.gradient.leftover[k] = Leftover.NOTHING
        self._updated.clear()
        self._squared = torch.zeros_like(self._squared)

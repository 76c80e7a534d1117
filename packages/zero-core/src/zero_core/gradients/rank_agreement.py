"""Exchanges facts between ranks before a step: the norm, used parameters, late gradients, digests of their calls.

Owns that exchange and its refusals. The store owns gradients and their norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import ChangedParameterError, CollectiveError, GradientError
from ..unit_memory.context import UnitContext
from ..unit_memory.unit import Unit
from ..unit_memory.unit_gradient import Leftover
from ..unit_memory.write_checks import Writes
from .reducer import Reducer


class Exchange:
    """Of one sharded model. Every call is collective."""

    def __init__(self, units: Sequence[Unit], context: UnitContext, reducer: Reducer, writes: Writes) -> None:
        self._units, self._ranks, self._observer = units, context.ranks, context.observer
        self._reducer, self._writes = reducer, writes

    def norm(self, squared: Callable[[], Tensor]) -> float:
        """The global gradient norm, from `squared`, this rank's sum of squares. Reduces late gradients first."""
        with self._observer.span("norm", ""):
            total, late = self._told(squared())
        if any(late):
            units = [unit for unit, flag in zip(self._units, late, strict=True) if flag]
            self._reducer.reduce_kept(units, late=units)
            with self._observer.span("norm", ""):
                total, _ = self._told(squared())
        return math.sqrt(total)

    def refuse_stepped(self) -> None:
        """torch keeps a gradient after step(): adds to it, and steps it once more. Ours are consumed."""
        for unit in self._units:
            for k in unit.gradient.left(Leftover.STEPPED):
                name = unit.layout.slots[k].name
                raise GradientError(
                    f"the gradients of the last step() were not zeroed (that of {name}, for one): torch would add to "
                    "them, and a sharded optimizer has consumed them. Call optimizer.zero_grad() after each step()"
                )

    def _told(self, squared: Tensor) -> tuple[float, list[bool]]:
        """The sum of this rank's `squared` over all ranks, and for each unit whether any rank has a late gradient.

        With it travel the used-parameter masks, and digests of the collectives called and of values written.
        """
        ranks, writes = self._ranks, self._writes
        unseen = writes.unseen_count()
        zeros = sum(unit.gradient.zeros for unit in self._units)
        lost = [unit.name for unit in self._units if unit.gradient.lost]
        if ranks.size == 1:
            self._refuse_zeros(zeros)
            self._refuse_lost(lost, len(lost))
            if unseen is None:
                return float(squared), []
            total, count = torch.stack([squared, unseen]).tolist()
            self._refuse_unseen(count)
            return total, []
        digests = [float(ranks.digest), float(writes.digest)]
        late = [float(unit.gradient.late) for unit in self._units]
        used = [float(flag) for unit in self._units for flag in unit.gradient.used]
        squares = [digest * digest for digest in digests]
        mine = ranks.numbers([0.0, 0.0, float(zeros), float(len(lost)), *digests, *squares, *late, *used])
        if ranks.replicate.rank == 0:  # replicas hold the same gradients
            mine[0] = squared
        if unseen is not None:
            mine[1] = unseen
        total = ranks.sum_everywhere(mine, "the gradient norm").tolist()
        called, written, called_squares, written_squares = total[4:8]
        if called_squares * ranks.size != called * called:
            raise CollectiveError(
                f"the {ranks.size} ranks did not call the same collectives in the same order since the last step "
                f"(digest on rank {ranks.rank}: {ranks.digest}): some rank used a parameter outside its unit, or ran "
                "another number of forwards. Nothing was updated; forwards inside zero_core.gathered may differ"
            )
        if written_squares * ranks.size != written * written:
            names = ", ".join(writes.digests) or "nothing"
            raise ChangedParameterError(
                f"the {ranks.size} ranks wrote different values since the last step (rank {ranks.rank} wrote into "
                f"{names}), as random numbers of different seeds or nn.Embedding(max_norm=) do: each rank keeps only "
                f"its slice, so the result would mix these values. {self._undone}Write the same on every rank, or "
                "inside zero_core.gathered, which keeps what rank 0 wrote"
            )
        self._refuse_unseen(total[1])
        self._refuse_zeros(total[2])
        self._refuse_lost(lost, total[3])
        writes.forget()
        flags = iter(total[8:])
        anywhere = [next(flags) > 0 for _ in late]
        for unit in self._units:
            unit.gradient.used = [next(flags) > 0 for _ in unit.gradient.used]
        return total[0], anywhere

    def _refuse_unseen(self, count: float) -> None:
        """Raise if a forward wrote through `p.data` on any rank. Such a write is lost, unlike all others."""
        if count:
            names = ", ".join(self._writes.unseen_names()) or "a unit of another rank"
            raise ChangedParameterError(
                f"the forward of {names} writes into a parameter through its .data. Such a write is not noticed, so "
                f"the value would be lost. {self._undone}Write into the parameter itself, in a torch.no_grad() block"
            )
        self._writes.forget()

    @property
    def _undone(self) -> str:
        return "" if self._reducer.updates else "Nothing was updated. "

    def _refuse_lost(self, names: Sequence[str], count: float) -> None:
        """A backward raised inside a unit. torch keeps the gradients that had arrived; those of this unit are lost."""
        if count:
            whose = f"unit {names[0]}" if names else "a unit on another rank"
            raise GradientError(
                f"a backward raised before the gradient of {whose} was complete, and the partial gradient is lost. "
                f"{self._undone}Call optimizer.zero_grad() and repeat the backwards of this step"
            )

    def _refuse_zeros(self, count: float) -> None:
        """Refuses zeros that zero_grad(set_to_none=False) left and no backward has reached: torch would step them."""
        if count:
            raise GradientError(
                f"zero_grad(set_to_none=False) left gradients of zero for {int(count)} parameters, counted over all "
                "ranks, that no backward has reached since: torch would still step them, with momentum and weight "
                f"decay. {self._undone}Leave set_to_none at True"
            )

"""Reduces complete gradients of units into the store, one at a time, or leaves them unreduced on this rank.

Before a step it tells the ranks each other's facts: the norm, used parameters, late gradients, digests of their calls.
Owns the decision to keep or reduce, the dropping of gradients, and the refusals of that exchange. Not here: when a
gradient is complete (in hooks/backward_pass.py). The store owns gradients and their norm.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import ChangedParameterError, CollectiveError, GradientError, UnsupportedOptimizerError
from ..tensors.version_counters import Stamp
from ..unit_memory.residency_policy import StageRow
from ..unit_memory.unit import Unit
from ..unit_memory.unit_gradient import Leftover, Reduction
from ..unit_memory.unit_memory import UnitContext
from ..unit_memory.write_checks import Writes

_BeginUpdate = Callable[[Unit], Callable[[], None]] | None


class Reducer:
    """The gradients of one sharded model.

    begin_update: called when the reduction of a unit has begun, returns the update, to call once the store has the
    gradient (update_in_backward), see `_accept`.
    """

    def __init__(
        self, units: Sequence[Unit], context: UnitContext, stage: StageRow, writes: Writes, begin_update: _BeginUpdate
    ) -> None:
        self.units, self.ranks, self.store, self.writes = units, context.ranks, context.store, writes
        self._observer, self._keeps, self.everywhere = context.observer, stage.keeps_gradients, stage.everywhere
        self._begin_update = begin_update
        self.updates = begin_update is not None  # units are updated in backward, which consumes their gradients there
        self._synchronising = True  # False inside no_sync
        self._under_way: tuple[Reduction, Callable[[], None] | None] | None = None
        self._updating: Callable[[], None] | None = None  # of the unit that was accepted last
        self.updating = False  # an update has begun and not ended
        self._squared: tuple[Stamp, Tensor] | None = None  # of the store's gradients, as they were then

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are kept and not reduced."""
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    def reduce_unit(self, unit: Unit) -> None:
        """This backward's gradient of the unit is complete: reduce it, or keep it at stage 1 and inside no_sync."""
        if not unit.trainable:
            return
        if self.ranks.size > 1 and (self._keeps or not self._synchronising):
            unit.gradient.keep()
        else:
            self._reduce(unit)

    def reduce_unit_late(self, unit: Unit) -> None:
        """A gradient reached the unit after this backward had reduced it, perhaps on this rank only: reduce that too.

        Several ranks agree on it at the step: `UnitGradient.late` and `reduce_kept`.
        """
        if self.ranks.size == 1:
            self._reduce(unit)
        elif unit.gradient.current is not None:
            unit.gradient.keep_late()

    def take_given(self, unit: Unit, wanted: Container[int]) -> None:
        """Reduces what visits left in `.grad` of these parameters of the unit: see `UnitGradient.given`."""
        for k in unit.gradient.given():
            if k in wanted:
                unit.gradient.collect(k)
        self.reduce_unit_late(unit)

    def end_backward(self, *, partial: bool) -> None:
        """Reduces gradients that came late; or every unit owes one, as other ranks may have reached it. partial: see
        `Backward`."""
        for unit in reversed(self.units):
            self.reduce_unit(unit) if self.everywhere and not partial else self.reduce_unit_late(unit)
        self.finish()

    def norm_squared(self) -> Tensor:
        """() float64, device: the sum of squares of this rank's gradients in the store."""
        if self._squared is None or not self._squared[0].current():
            stamp = Stamp(unit.gradient.in_store for unit in self.units)
            self._squared = stamp, self.store.gradient_norm_squared()
        return self._squared[1]

    def _reduce(self, unit: Unit) -> None:
        if self.ranks.size == 1 and unit.gradient.current is None:
            return
        if self._under_way is not None and self._under_way[0].of is unit.gradient:
            self.finish()  # a second reduction of it would begin in the memory that the first one still uses
        reduction = unit.gradient.reduce()
        update = None if self._begin_update is None else self._begin_update(unit)
        self._accept()
        self._under_way = reduction, update
        if self.ranks.size == 1:
            self._accept()

    def finish(self) -> None:
        """Wait for the reduction under way, if there is one, and make the pending update of update_in_backward."""
        self._accept()
        self._update()

    def _accept(self) -> None:
        """Hand the reduction under way to the store.

        With update_in_backward the unit is then updated: the exchange that an update waits for was begun with the
        reduction. Where the store keeps gradients in host memory and the device is discrete, the update comes a unit
        later, so that the host waits for the copy of a gradient while the device computes the next unit's backward.
        """
        if self._under_way is None:
            return
        self._update()  # before the store has another gradient, which its norm would include
        (reduction, update), self._under_way = self._under_way, None
        reduction.finish()
        self._updating = update
        if not self.store.swaps_in:
            self._update()

    def _update(self) -> None:
        update, self._updating = self._updating, None
        if update is not None:
            with self.update_under_way():
                update()

    @contextmanager
    def update_under_way(self) -> Iterator[None]:
        """Encloses an update of one unit or of all. If it raises, or Ctrl-C comes, it is not complete."""
        self.updating = True
        yield
        self.updating = False

    def reduce_kept(self, units: Sequence[Unit] | None = None, late: Container[Unit] = ()) -> None:
        """Reduce the gradients of `units` (all by default) that stage 1 and no_sync kept; zero the dropped ones.

        In the order of backward. late: units with a late gradient on some rank, which is reduced as well.
        """
        for unit in reversed(self.units if units is None else units):
            unit.gradient.forget_dropped()
            if unit in late or unit.gradient.owed:
                self._reduce(unit)
        self.finish()

    def begin_anew(self) -> None:
        """After Ctrl-C at any line: nothing is under way, and the store has no gradient."""
        self._under_way = self._updating = None
        self.store.discard_gradients()

    def discard(self, leftover: Leftover = Leftover.NOTHING) -> None:
        """Forget every gradient. leftover: see `UnitGradient.consumed`."""
        self.store.discard_gradients()  # first: a store that refuses, because it sleeps, keeps all of them
        self._updating = None
        for unit in self.units:
            unit.gradient.discard(leftover)

    def drop(self, unit: Unit, k: int) -> bool:
        """Drop one parameter's gradient; whether any is left."""
        gradient = unit.gradient
        if gradient.leftover[k] is not Leftover.NOTHING and not (gradient.used[k] or gradient.arrived):
            gradient.leftover[k] = Leftover.NOTHING  # the step has consumed it: there is none to discard
            return True
        gradient.drop(k)
        # the unit first: it answers at once while its others are held, so zero_grad() over n parameters is not n * n
        return any(each.gradient.holds(j) for each in (unit, *self.units) for j in range(len(each.parameters)))

    # -- facts that ranks exchange before a step ---------------------------------------------------------------------

    def norm(self, squared: Callable[[], Tensor], options: str = "") -> float:
        """The global gradient norm, from `squared`, this rank's sum of squares. Reduces late gradients first. Raises
        UnsupportedOptimizerError where `options`, with which this rank will step, differ between ranks. Collective."""
        with self._observer.span("norm", ""):
            total, late = self._told(squared(), options)
        if any(late):
            units = [unit for unit, flag in zip(self.units, late, strict=True) if flag]
            self.reduce_kept(units, late=units)
            with self._observer.span("norm", ""):
                total, _ = self._told(squared(), options)
        return math.sqrt(total)

    def refuse_stepped(self) -> None:
        """torch keeps a gradient after step(): adds to it, and steps it once more. Ours are consumed."""
        for unit in self.units:
            for k in unit.gradient.left(Leftover.STEPPED):
                name = unit.layout.slots[k].name
                raise GradientError(
                    f"the gradients of the last step() were not zeroed (that of {name}, for one). Plain torch would "
                    "step them again, and step() here has freed them. Call optimizer.zero_grad() after each step()"
                )

    def _told(self, squared: Tensor, options: str) -> tuple[float, list[bool]]:
        """The sum of this rank's `squared` over all ranks, and for each unit whether any rank has a late gradient.

        With it travel the used-parameter masks, and digests of the collectives called, values written and options.
        """
        ranks, writes = self.ranks, self.writes
        unseen = writes.unseen_count()
        zeros = sum(unit.gradient.zeros for unit in self.units)
        lost = [unit.name for unit in self.units if unit.gradient.lost]
        if ranks.size == 1:
            self._refuse_zeros(zeros)
            self._refuse_lost(lost, len(lost))
            if unseen is None:
                return float(squared), []
            total, count = torch.stack([squared, unseen]).tolist()
            self._refuse_unseen(count)
            return total, []
        digests = [float(ranks.digest), float(writes.digest), float(zlib.crc32(options.encode()) >> 12)]
        late = [float(unit.gradient.late) for unit in self.units]
        used = [float(flag) for unit in self.units for flag in unit.gradient.used]
        squares = [digest * digest for digest in digests]
        mine = ranks.numbers([0.0, 0.0, float(zeros), float(len(lost)), *digests, *squares, *late, *used])
        if ranks.replicate.rank == 0:  # replicas hold the same gradients
            mine[0] = squared
        if unseen is not None:
            mine[1] = unseen
        total = ranks.sum_everywhere(mine, "the gradient norm").tolist()
        called, written, other = (s * ranks.size != t * t for t, s in zip(total[4:7], total[7:10], strict=True))
        if called:
            raise CollectiveError(
                f"the {ranks.size} ranks did not call the same collectives in the same order since the last step "
                f"(digest on rank {ranks.rank}: {ranks.digest}): some rank used a parameter outside its unit, or ran "
                "another number of forwards. Nothing was updated; forwards inside zero_core.gathered may differ"
            )
        if written:
            names = ", ".join(writes.digests) or "nothing"
            raise ChangedParameterError(
                f"the {ranks.size} ranks wrote different values since the last step (rank {ranks.rank} wrote into "
                f"{names}), as random numbers of different seeds or nn.Embedding(max_norm=) do: each rank keeps only "
                f"its slice, so the result would mix these values. {self._undone}Write the same on every rank, or "
                "inside zero_core.gathered, which keeps what rank 0 wrote"
            )
        if other:
            raise UnsupportedOptimizerError(
                f"the {ranks.size} ranks step with different options (rank {ranks.rank}: {options:.300}): each "
                f"rank updates only its slice, so the result would mix them. {self._undone}Set the same on every rank. "
                "For ReduceLROnPlateau, average the metric over the ranks, by torch.distributed.all_reduce"
            )
        self._refuse_unseen(total[1])
        self._refuse_zeros(total[2])
        self._refuse_lost(lost, total[3])
        flags = iter(total[10:])
        anywhere = [next(flags) > 0 for _ in late]
        for unit in self.units:
            unit.gradient.used = [next(flags) > 0 for _ in unit.gradient.used]
        return total[0], anywhere

    def _refuse_unseen(self, count: float) -> None:
        """Raise if a forward wrote through `p.data` on any rank. Such a write is lost, unlike all others."""
        if count:
            names = ", ".join(self.writes.unseen_names()) or "a unit of another rank"
            raise ChangedParameterError(
                f"the forward of {names} writes into a parameter through parameter.data. Such a value never gets into "
                f"the shards. {self._undone}Write into the parameter itself, in a torch.no_grad() block"
            )
        self.writes.forget()

    @property
    def _undone(self) -> str:
        return "" if self.updates else "Nothing was updated. "

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

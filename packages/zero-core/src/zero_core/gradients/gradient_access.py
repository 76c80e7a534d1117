"""Reads and edits the complete gradient before the step: norms, and the full gradient of one parameter.

Owns when a gradient can be read, the way from shards to one tensor and back, and the factors of held gradients, as of
torch's clipping by `p.grad.mul_(c)`, until a step applies them. It is called between backward and step().
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ..errors import GradientError
from ..store import CHUNK_NUMEL
from ..unit_memory.unit import Unit
from ..unit_memory.unit_gradient import Leftover
from .loss_scaling import LossScale
from .reducer import Reducer

Key = tuple[int, int]  # a unit's index, and the number of a parameter in it
USED_UP = (
    "no longer exists, because update_in_backward=True frees gradients during backward. Change the gradient in a "
    "hook, parameter.register_hook(function). Or leave update_in_backward=True out of zero_core.shard"
)


class Factors(dict[Key, tuple[float, ...]]):
    """For each parameter, the factors since its gradient was last written, in order."""

    _read: tuple[Tensor, int, float] | None = None  # the tensor that was given last, its version, its number

    def multiply(self, key: Key, factor: Tensor | float) -> None:
        """Adds a factor: a number, or a tensor of one element. The host reads a tensor once for all gradients that it
        multiplies."""
        if isinstance(factor, Tensor):
            if self._read is None or self._read[0] is not factor or self._read[1] != factor._version:
                self._read = factor, factor._version, float(factor.detach())
            factor = self._read[2]
        self[key] = (*self.get(key, ()), factor)

    def apply(self, key: Key, values: Tensor) -> Tensor:
        """Multiplies `values`, of the parameter's gradient, in place, and returns them."""
        for factor in self.get(key, ()):
            values.mul_(factor)
        return values

    def forget(self, key: Key | None = None) -> None:
        """Drops the factors of one parameter. key: None means all."""
        if key is None:
            self.clear()
            self._read = None
        else:
            self.pop(key, None)

    def common(self, keys: Iterable[Key]) -> float | None:
        """Returns the factor that all of these have in common; None if they differ."""
        if not self:
            return 1.0
        found = {self.get(key, ()) for key in keys}
        return math.prod(found.pop(), start=1.0) if len(found) == 1 else 1.0 if not found else None

    def numbers(self) -> Tensor:
        """Returns (n,) float64, CPU: all different factors, for a comparison between ranks."""
        found = {f for factors in self.values() for f in factors}
        return torch.tensor(sorted(found), dtype=torch.float64, device="cpu")


class GradientAccess:
    """The gradients of one sharded model, between backward and step()."""

    def __init__(self, reducer: Reducer, loss_scale: LossScale | None, abandon_backward: Callable[[], None]) -> None:
        """abandon_backward: called where a backward may have raised."""
        self._reducer, self._loss_scale, self._abandon_backward = reducer, loss_scale, abandon_backward
        self._units, self._ranks, self._store = reducer.units, reducer.ranks, reducer.store
        self.factors = Factors()

    def _refuse_used_up(self, name: str) -> None:
        if self._reducer.updates:
            raise GradientError(f"the gradient of {name} {USED_UP}")

    def _complete(self, unit: Unit, k: int) -> bool:
        """Let the store have all of the parameter's gradient. False: there is none, on any rank. Collective."""
        name = unit.layout.slots[k].name
        self._refuse_used_up(name)
        if unit.groups[k] is None:
            if not unit.parameters[k].requires_grad:
                return False
            raise GradientError(
                f"{name} requires a gradient and is in no group of the optimizer, so this rank's gradient of it "
                "stays in p.grad: use that. Or give the parameter to the optimizer before zero_core.shard"
            )
        if unit.gradient.leftover[k] is Leftover.STEPPED:
            raise GradientError(
                f"step() has used up the gradient of {name}: read or change the gradient between backward() and "
                "step(), and call optimizer.zero_grad() after each step()"
            )
        self._abandon_backward()
        self._reducer.take_given(unit, [k])
        if not self._complete_all([(unit, k)])[0]:
            return False
        if unit.gradient.lost or not unit.gradient.arrived:
            raise GradientError(
                f"the last backward raised before the gradient of {name} was complete: call optimizer.zero_grad() "
                "and repeat the backwards of this step"
            )
        return True

    def _complete_all(self, wanted: Sequence[tuple[Unit, int]]) -> list[bool]:
        """Let the stores have all of the gradient of each parameter. Returns whether any rank has one. Collective.

        Other ranks' flags decide too, so that all of them reduce, or none.
        """
        self._abandon_backward()
        mine = [flag for unit, k in wanted for flag in (unit.gradient.used[k], unit.gradient.late)]
        what = f"the full gradient of {', '.join(unit.layout.slots[k].name for unit, k in wanted[:3])}"
        flags = self._ranks.anywhere(mine, what)
        used, late = flags[::2], flags[1::2]
        units = dict.fromkeys(unit for (unit, _), there in zip(wanted, used, strict=True) if there)
        self._reducer.reduce_kept([*units], late={unit for (unit, _), flag in zip(wanted, late, strict=True) if flag})
        return used

    def read(self, unit: Unit, k: int) -> Tensor | None:
        """Returns the parameter's gradient as step() would use it, before clipping, fp32, or None. Collective."""
        if not self._complete(unit, k):
            zeroed = unit.gradient.leftover[k] is Leftover.ZEROED
            return torch.zeros(unit.layout.slots[k].shape, device=unit.ranks.device).float() if zeroed else None
        whole = unit.full_values(k, partial(self._store.read_gradient, unit.index))
        values = self.factors.apply((unit.index, k), whole)
        scale = self._loss_scale
        return values if scale is None else values.mul_(1.0 / scale.value)

    def write(self, unit: Unit, k: int, flat: Tensor) -> bool:
        """Make `flat` (numel,) fp32 the parameter's gradient; False: it has none to overwrite. Collective."""
        if not self._complete(unit, k):
            return False
        self._reducer.writes.note(f"the gradient of {unit.layout.slots[k].name}", flat)
        if self._loss_scale is not None:
            flat = flat * self._loss_scale.value
        if (piece := unit.layout.piece(unit.ranks.shard.rank, k)) is not None:
            self._store.write_gradient(unit.index, piece.shard_start, flat[piece.slot_start : piece.slot_stop])
        self.factors.forget((unit.index, k))
        unit.gradient.in_store.wrote()
        unit.gradient.versions[k].wrote()
        return True

    def _held(self) -> list[Key]:
        """Parameters that have a gradient for the next step; the same on every rank."""
        return [(unit.index, k) for unit in self._units for k in range(len(unit.groups)) if unit.gradient.holds(k)]

    def power_sum(self, keys: Sequence[Key], order: float) -> float:
        """The sum of |g| ** order over the gradients of these parameters; of order inf their largest |g|. Collective.

        Of all gradients and order 2 it is the square of the norm that step() computes, which reads no gradient.
        """
        scale = 1.0 if self._loss_scale is None else self._loss_scale.value
        if order == 2 and sorted(keys) == sorted(self._held()):
            self._reducer.refuse_stepped()
            self._abandon_backward()
            self._reducer.reduce_kept()
            if (common := self.factors.common(keys)) is not None:
                return (common / scale * self._reducer.norm(self._reducer.norm_squared)) ** 2
        self._refuse_used_up(self._units[keys[0][0]].layout.slots[keys[0][1]].name)
        self._complete_all([(self._units[u], k) for u, k in keys])
        sums = []
        for u, k in keys:
            unit, found = self._units[u], torch.zeros((), dtype=torch.float64, device=self._ranks.device)
            if unit.gradient.arrived and self._ranks.replicate.rank == 0:  # replicas hold the same gradients
                for start, stop in _mine(unit, k):
                    values = self.factors.apply((u, k), self._store.read_gradient(u, start, stop)).mul_(1.0 / scale)
                    norm = torch.linalg.vector_norm(values, order, dtype=torch.float64).to(found.device)
                    found = torch.fmax(found, norm) if order == torch.inf else found + norm**order
                    found = torch.where(norm.isnan(), norm, found)
            sums.append(found)
        mine = torch.stack(sums)
        if order != torch.inf:
            return float(self._ranks.sum_everywhere(mine, "the gradients' norms").sum())
        rows = mine.new_zeros(self._ranks.size)
        rows[self._ranks.rank] = mine.max()  # nan, if there is one
        return float(self._ranks.sum_everywhere(rows, "the gradients' norms").max())

    def take_factor(self) -> float:
        """Returns the factor that all gradients have in common, for step().

        Where they differ, each is multiplied by its own here, and 1 is returned.
        """
        if not self.factors:
            return 1.0
        self._reducer.writes.note("gradients, p.grad.mul_()", self.factors.numbers())
        if (common := self.factors.common(self._held())) is None:
            self.apply_factors()
            return 1.0
        return common

    @torch.no_grad()
    def apply_factors(self) -> None:
        """Multiply the stored gradients by their pending factors, before others are added to them."""
        for u, k in self.factors:
            unit = self._units[u]
            if unit.gradient.kept is not None:  # not reduced yet, perhaps on this rank alone
                slot = unit.layout.slots[k]
                self.factors.apply((u, k), unit.gradient.kept[slot.offset : slot.stop])
            if unit.gradient.stored:
                self._refuse_used_up(unit.layout.slots[k].name)
                unit.gradient.in_store.wrote()
                for start, stop in _mine(unit, k):
                    values = self.factors.apply((u, k), self._store.read_gradient(u, start, stop))
                    self._store.write_gradient(u, start, values)
        self.factors.forget()


def _mine(unit: Unit, k: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of the parameter's elements in this rank's shard, a chunk at a time."""
    if (piece := unit.layout.piece(unit.ranks.shard.rank, k)) is not None:
        for start in range(piece.shard_start, piece.shard_stop, CHUNK_NUMEL):
            yield start, min(start + CHUNK_NUMEL, piece.shard_stop)

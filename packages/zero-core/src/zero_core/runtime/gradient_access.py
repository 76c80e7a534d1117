"""The complete gradient of a step: its norms, one parameter's of it whole, and edits of it before the step.

Owns when it can be had, what is done with pending factors, and the way from shards to one tensor and back. It is called
between backward and step().
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import GradientError
from ..store import CHUNK_NUMEL, ShardStore
from .factors import Key
from .gradient import Leftover
from .outputs import in_backward
from .unit import Unit

if TYPE_CHECKING:
    from .hooks import Engine

__all__ = ["apply_factors", "complete", "edit", "power_sum", "read", "refusal", "take_factor", "write"]


USED_UP = (
    "was used up in backward, as zero_core.shard(update_in_backward=True) says: leave that out, or change the gradient "
    "in parameter.register_hook"
)


def refusal(engine: Engine) -> str | None:
    """Why nothing can be asked about shards now, and the way out."""
    if engine.busy or in_backward():
        return (
            "inside forward or backward: call it after loss.backward() returned. A gradient can be changed on its way, "
            "too: parameter.register_hook sees this rank's part of it"
        )
    if engine.gathered:
        return "inside zero_core.gathered, which writes parameters back at its end: leave the with block first"
    return None


def access(engine: Engine, name: str) -> ShardStore:
    """The store. Raises GradientError if it has no gradients left that can be read."""
    if engine.reducer.updates:
        raise GradientError(f"the gradient of {name} {USED_UP}")
    return engine.store


def complete(engine: Engine, unit: Unit, k: int) -> ShardStore | None:
    """The store, which has all of the parameter's gradient. None: there is no gradient, on any rank. Collective."""
    name, parameter = unit.layout.slots[k].name, unit.parameters[k]
    store = access(engine, name)
    if unit.groups[k] is None:
        if not parameter.requires_grad:
            return None
        raise GradientError(
            f"{name} requires a gradient and is in no group of the optimizer, so its gradient is dropped in "
            "backward: give it to the optimizer before zero_core.shard"
        )
    if unit.gradient.leftover[k] is Leftover.STEPPED:
        raise GradientError(
            f"step() has used up the gradient of {name}: ask between backward() and step(), and call "
            "optimizer.zero_grad() after each step()"
        )
    if not _complete_all(engine, [(unit, k)])[0]:
        return None
    if unit.gradient.lost or not unit.gradient.arrived:
        raise GradientError(
            f"the last backward raised before the gradient of {name} was complete: call optimizer.zero_grad() "
            "and repeat the backwards of this step"
        )
    return store


def _complete_all(engine: Engine, wanted: Sequence[tuple[Unit, int]]) -> list[bool]:
    """Whether any rank has a gradient of each parameter for the next step. The stores then have all of it. Collective.

    Other ranks' flags decide too, so that all of them reduce, or none.
    """
    engine.abandon_backward()
    mine = [flag for unit, k in wanted for flag in (unit.gradient.used[k], unit.gradient.late)]
    what = f"the full gradient of {', '.join(unit.layout.slots[k].name for unit, k in wanted[:3])}"
    flags = engine.ranks.anywhere(mine, what)
    used, late = flags[::2], flags[1::2]
    units = dict.fromkeys(unit for (unit, _), there in zip(wanted, used, strict=True) if there)
    engine.reducer.reduce_kept([*units], late={unit for (unit, _), flag in zip(wanted, late, strict=True) if flag})
    return used


def read(engine: Engine, unit: Unit, k: int) -> Tensor | None:
    """What step() would take for the parameter's gradient before clipping, fp32; None if there is none. Collective."""
    store = complete(engine, unit, k)
    if store is None:
        zeroed = unit.gradient.leftover[k] is Leftover.ZEROED
        return torch.zeros(unit.layout.slots[k].shape, device=unit.ranks.device) if zeroed else None
    values = engine.factors.apply((unit.index, k), unit.full_values(k, partial(store.read_gradient, unit.index)))
    scale = engine.loss_scale
    return values if scale is None else values.mul_(1.0 / scale.value)


def write(engine: Engine, unit: Unit, k: int, flat: Tensor) -> bool:
    """Make `flat` (numel,) fp32 the parameter's gradient; False: it has none to overwrite. Collective."""
    store = complete(engine, unit, k)
    if store is None:
        return False
    engine.writes.note(f"the gradient of {unit.layout.slots[k].name}", flat)
    if engine.loss_scale is not None:
        flat = flat * engine.loss_scale.value
    piece = unit.layout.piece(unit.ranks.shard.rank, k)
    if piece is not None:
        store.write_gradient(unit.index, piece.shard_start, flat[piece.slot_start : piece.slot_stop])
    _changed(engine, unit, k)
    return True


def edit(engine: Engine, unit: Unit, k: int, change: Callable[[Tensor], Any]) -> None:
    """Call `change` with parts of the gradient, fp32 and without the loss scale, and keep what it wrote. Collective."""
    store = complete(engine, unit, k)
    if store is None:
        return
    scale = 1.0 if engine.loss_scale is None else engine.loss_scale.value
    for start, stop in _mine(unit, k):
        values = engine.factors.apply((unit.index, k), store.read_gradient(unit.index, start, stop))
        change(values.mul_(1.0 / scale))
        store.write_gradient(unit.index, start, values.mul_(scale))
    _changed(engine, unit, k)


def _changed(engine: Engine, unit: Unit, k: int) -> None:
    engine.factors.forget((unit.index, k))
    unit.gradient.in_store.wrote()
    unit.gradient.versions[k].wrote()


def _mine(unit: Unit, k: int) -> Iterator[tuple[int, int]]:
    """Elements [start, stop) of this rank's shard that are the parameter's, a chunk at a time."""
    piece = unit.layout.piece(unit.ranks.shard.rank, k)
    if piece is not None:
        for start in range(piece.shard_start, piece.shard_stop, CHUNK_NUMEL):
            yield start, min(start + CHUNK_NUMEL, piece.shard_stop)


def _held(engine: Engine) -> list[Key]:
    """Parameters that have a gradient for the next step; the same on every rank."""
    return [(unit.index, k) for unit in engine.units for k in range(len(unit.groups)) if unit.gradient.holds(k)]


def power_sum(engine: Engine, keys: Sequence[Key], order: float) -> float:
    """The sum of |g| ** order over the gradients of these parameters; of order inf their largest |g|. Collective.

    Of all gradients and order 2 it is the square of the norm that step() computes, which reads no gradient.
    """
    scale = 1.0 if engine.loss_scale is None else engine.loss_scale.value
    if order == 2 and sorted(keys) == sorted(_held(engine)):
        engine.exchange.refuse_stepped()
        engine.abandon_backward()
        engine.reducer.reduce_kept()
        common = engine.factors.common(keys)
        if common is not None:
            return (common / scale * engine.exchange.norm(engine.reducer.norm_squared)) ** 2
    store = access(engine, engine.units[keys[0][0]].layout.slots[keys[0][1]].name)
    _complete_all(engine, [(engine.units[u], k) for u, k in keys])
    sums = []
    for u, k in keys:
        unit, found = engine.units[u], torch.zeros((), dtype=torch.float64, device=engine.ranks.device)
        if unit.gradient.arrived and engine.ranks.replicate.rank == 0:  # replicas hold the same gradients
            for start, stop in _mine(unit, k):
                values = engine.factors.apply((u, k), store.read_gradient(u, start, stop)).mul_(1.0 / scale)
                norm = torch.linalg.vector_norm(values, order, dtype=torch.float64).to(found.device)
                found = torch.fmax(found, norm) if order == torch.inf else found + norm**order
                found = torch.where(norm.isnan(), norm, found)
        sums.append(found)
    mine = torch.stack(sums)
    if order != torch.inf:
        return float(engine.ranks.sum_everywhere(mine, "the gradients' norms").sum())
    rows = mine.new_zeros(engine.ranks.size)
    rows[engine.ranks.rank] = mine.max()  # nan, if there is one
    return float(engine.ranks.sum_everywhere(rows, "the gradients' norms").max())


def take_factor(engine: Engine) -> float:
    """What the step has to multiply all gradients by, for the user; those with others are multiplied here."""
    if not engine.factors:
        return 1.0
    engine.writes.note("gradients, p.grad.mul_()", engine.factors.numbers())
    common = engine.factors.common(_held(engine))
    if common is None:
        apply_factors(engine)
        return 1.0
    return common


@torch.no_grad()
def apply_factors(engine: Engine) -> None:
    """Multiply the stored gradients by what is pending: something is about to be added to them."""
    for u, k in engine.factors.keys():
        unit = engine.units[u]
        if unit.gradient.kept is not None:  # not reduced yet, perhaps on this rank alone
            slot = unit.layout.slots[k]
            engine.factors.apply((u, k), unit.gradient.kept[slot.offset : slot.stop])
        if unit.gradient.stored:
            store = access(engine, unit.layout.slots[k].name)
            unit.gradient.in_store.wrote()
            for start, stop in _mine(unit, k):
                store.write_gradient(u, start, engine.factors.apply((u, k), store.read_gradient(u, start, stop)))
    engine.factors.forget()

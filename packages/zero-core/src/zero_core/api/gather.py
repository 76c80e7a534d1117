"""Gathers full parameters, which can be written inside a `with` (`gathered`). Collective, and nestable.

`trained_state_dict` returns full copies of the trained parameters and the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import GradientError, ZeroError
from ..hooks.engine import Engine
from ..hooks.parameter_access import Place, sharded_places
from ..model.parameter_names import named_tensors
from ..optim.optimizer import ShardedOptimizer
from ..precision import as_bytes
from ..unit_memory.stacked_parameter import Stacked
from ..unit_memory.unit import Unit


@torch.no_grad()
def trained_state_dict(model: nn.Module, also: Callable[[str], bool] = lambda name: False) -> dict[str, Tensor]:
    """Returns full copies of the trained parameters, in their dtype, and of the persistent buffers. Collective.

    model.state_dict() gathers the frozen parameters too. also: says by name which of these to include. Raises ZeroError
    for a module without sharded parameters.
    """
    sharded_places(model)
    found = {}
    for named in named_tensors(model):
        place: Any = named.tensor.__dict__.get("_zero_home")
        if place is None:
            value = named.tensor.detach().clone()
        elif place.unit.trainable or any(map(also, named.names)):
            value = place.full_copy(named.tensor)
        else:
            continue
        found.update(dict.fromkeys(named.names, value))
    return found


@contextmanager
def gathered(module: nn.Module, master: bool = False) -> Iterator[nn.Module]:
    """Inside, the parameters of `module` are full and writable; forwards of it call no collective.

    On leaving, every rank takes rank 0's values, and writes of other ranks are lost. Optimizer states stay. master:
    parameters are the fp32 masters inside, whatever their dtype. An exception inside discards all writes. Raises
    ZeroError for a module without sharded parameters.

    Examples:
        >>> import torch, zero_core
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with zero_core.gathered(model), torch.no_grad():
        ...     _ = model.weight.fill_(3.0)
        >>> model(torch.ones(1, 2)).sub(model.bias).tolist()
        [[6.0, 6.0]]
        >>> optimizer.close()
    """
    places = sharded_places(module)
    engine: Engine = places[0].engine
    if engine.busy:
        raise ZeroError("gathered() inside forward or backward: a parameter used there gathers itself")
    units = {id(place.unit): place.unit for place in places}.values()
    opened = [unit for unit in sorted(units, key=lambda unit: unit.index) if unit.users == 0]
    with torch.no_grad():
        for unit in opened:
            unit.unshard(copy=True)
            unit.enter()
            if master and unit.trainable:  # a frozen parameter is its own master
                for k in range(len(unit.parameters)):
                    unit.show(k, unit.full_state(k, "master"))
        whole = [each for each in engine.stacks.parameters if each.unit in opened]
        versions = [stacked.gather() for stacked in whole]
    refusal = register_optimizer_step_pre_hook(_refuse_without_gradients)
    engine.gathered += 1
    try:
        yield module
    except BaseException:
        for stacked in whole:
            stacked.adopt()
        for unit in opened:
            _hide(unit) if master or whole else None
            _close(unit)
        raise
    finally:
        engine.gathered -= 1
        refusal.remove()
    with torch.no_grad():
        for stacked, version in zip(whole, versions, strict=True):
            stacked.count_writes(version)
        _count_writes(engine, opened)
        for stacked in whole:
            stacked.part()
        for unit in opened:
            _keep(unit, master)


def _refuse_without_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises in step() of a plain optimizer, which would find no gradients and silently change nothing."""
    if isinstance(optimizer, ShardedOptimizer):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            home = parameter.__dict__.get("_zero_home") if parameter.grad is None else None
            if isinstance(home, (Place, Stacked)) and home.held_gradient(parameter) is not None:
                raise GradientError(
                    f"step() of a plain {type(optimizer).__name__} inside zero_core.gathered: the gradient of "
                    f"{home.name} left for the shards during backward, so this step would not change it. Call step() "
                    "of the optimizer that zero_core.shard returned, outside of gathered; or set p.grad yourself from "
                    "torch.autograd.grad(loss, parameters)"
                )


def _count_writes(engine: Engine, units: Sequence[Unit]) -> None:
    """Counts a write of any rank as a change on every rank, so that all of them refuse a backward, or none does."""
    if engine.ranks.size == 1:
        return
    written = [flag for unit in units for flag in unit.watch.written()]
    places = ((unit, k) for unit in units for k in range(len(unit.parameters)))
    for (unit, k), mine, anywhere in zip(places, written, engine.ranks.anywhere(written, "gathered"), strict=True):
        if anywhere and not mine:
            unit.overwritten(k)


def _close(unit: Unit) -> None:
    unit.leave()
    unit.reshard()


def _hide(unit: Unit) -> None:
    for k, view in enumerate(unit.views):
        unit.show(k, view)


def _keep(unit: Unit, master: bool) -> None:
    """Takes rank 0's values. Writes only changed elements of this rank's slice: the other masters keep their bits."""
    dtype = unit.master_dtype if master else unit.dtype
    whole = torch.zeros(unit.layout.numel, dtype=dtype, device=unit.ranks.device)
    for parameter, slot in zip(unit.parameters, unit.layout.slots, strict=True):
        whole[slot.offset : slot.stop].copy_(parameter.detach().reshape(-1))
    if master:
        _hide(unit)
    else:
        for parameter, view in zip(unit.parameters, unit.views, strict=True):
            if parameter.dtype == view.dtype and parameter.shape == view.shape:
                parameter.data = view  # it may have been given other memory, by p.data = tensor or model.to("cpu:0")
    _close(unit)
    unit.ranks.broadcast(as_bytes(whole), unit.name)
    start, stop = unit.layout.shard_range(unit.ranks.shard.rank)
    unit.keep(whole[start:stop], master=master)

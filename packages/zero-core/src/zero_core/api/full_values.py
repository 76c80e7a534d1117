"""Gathers full parameters, and reads and overwrites a parameter's full gradient, fp32 master or optimizer state.

Parameters can be written inside a `with` (`gathered`), which can be nested; the others are read and written between two
steps. `trained_state_dict` returns full copies of the trained parameters and the buffers. Owns when each value can be
had, and the way from shards to one tensor and back. All functions are collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
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
        for unit, k in [part for stacked in whole for part in stacked.cut_gradient()]:
            engine.reducer.take_given(unit, [k])
        for unit in opened:
            unit.gradient.given()
    except BaseException:
        for stacked in whole:
            stacked.cut_gradient()
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
                    f"step() of a plain {type(optimizer).__name__} inside zero_core.gathered would not change "
                    f"{home.name}, because its gradient moved to the shards during backward. Call step() of the "
                    "optimizer that zero_core.shard returned, outside of gathered. Or compute the gradients with "
                    "torch.autograd.grad(loss, parameters), and set p.grad yourself"
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


@torch.no_grad()
def full_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Returns the parameter's gradient as step() would use it, before clipping: a copy, fp32, of its shape.

    It is on the parameter's device, the mean over all ranks, and without the loss scale. On one rank in fp32 it has the
    bits of `p.grad` in plain torch. None where torch has none: no backward reached the parameter since the last
    zero_grad(), `p.grad = None` dropped it, or it is frozen. Zeros where zero_grad(set_to_none=False) left them.
    Collective: every rank calls it, and all get the same. Gradients of the parameter's unit that stage 1 and no_sync
    keep are reduced now, so call it after the last backward of a step.

    Raises GradientError where there was a gradient that is gone: after step() until zero_grad(), and with
    update_in_backward. Raises ZeroError inside forward, backward and `gathered`, and if the parameter is not
    sharded.

    Examples:
        >>> import torch, zero_core
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model(torch.tensor([[1.0, 2.0]])).sum().backward()
        >>> zero_core.full_gradient(model.weight)
        tensor([[1., 2.]])
        >>> zero_core.set_full_gradient(model.weight, torch.zeros(1, 2))
        >>> optimizer.step()
        >>> optimizer.close()
    """
    return _home(parameter, "full_gradient").join(lambda place: place.engine.gradients.read(place.unit, place.index))


@torch.no_grad()
def set_full_gradient(parameter: nn.Parameter, values: Tensor) -> None:
    """Makes `values`, of the parameter's shape, the gradient that step() takes, and whose norm it clips.

    They are taken in fp32, without the loss scale, as `full_gradient` returns them; a later backward adds to them.
    Where gradients arrive in 16 bits and the values need more, the unit's gradients are kept in fp32 from here on; a
    zero_offload.TieredStore that has memory for one micro-batch alone refuses such values. Collective: every rank gives
    the same values, or step() raises. Raises the errors of `full_gradient`, and GradientError if the parameter has no
    gradient.
    """
    home = _home(parameter, "set_full_gradient")
    parts = home.cut(_wide("set_full_gradient", home, values, home.shape))
    if not all([place.engine.gradients.write(place.unit, place.index, rows.reshape(-1)) for place, rows, _ in parts]):
        raise GradientError(
            f"set_full_gradient() of {home.name}, which has no gradient: it is frozen (unfreeze it before shard()), or "
            "no backward has reached it since zero_grad() (call set_full_gradient() between backward() and step())"
        )


@torch.no_grad()
def full_state(parameter: nn.Parameter, name: str) -> Tensor | None:
    """Returns a copy of the parameter's fp32 master ("master") or of a state ("exp_avg" ...), fp32, of its shape.

    A state to which the optimizer gives another shape has that one. It is on the parameter's device. None where torch
    has no state: the parameter has taken no step yet (also with Adagrad, which in torch makes its state earlier), or it
    is frozen. Waits for updates under way. Collective.

    Raises ZeroError for the master of a frozen parameter, for a name that the optimizer does not keep, inside forward,
    backward and `gathered`, and if the parameter is not sharded.
    """

    def state(place: Place) -> Tensor | None:
        if name != "master" and not place.unit.steps[place.index]:
            return None
        return place.unit.full_state(place.index, name)

    return _state_home(parameter, name, "full_state").join(state)


@torch.no_grad()
def set_full_state(parameter: nn.Parameter, name: str, values: Tensor) -> None:
    """Overwrites the state that `full_state` returns with `values` of its shape. The parameter follows its master.

    Collective: every rank gives the same values, or step() raises. Raises the errors of `full_state`, and ZeroError for
    a state of a parameter that has taken no step.
    """
    home = _state_home(parameter, name, "set_full_state")
    shaped = home.unit.shaped(home.index) if isinstance(home, Place) else {}
    wide = _wide("set_full_state", home, values, shaped.get(name, home.shape))
    if name != "master" and not all(place.unit.steps[place.index] for place in home.places):
        raise ZeroError(
            f"set_full_state({name!r}) of {home.name}, which has taken no step and has no {name} yet: call it after "
            "the first step(), or give zero_core.shard an optimizer that has its states already"
        )
    for place, rows, part in home.cut(wide):
        engine, unit, k, flat = place.engine, place.unit, place.index, rows.reshape(-1)
        if name == "master":
            engine.copies.write(unit, k, flat, part)
        else:
            engine.writes.note(f"{name} of {place.name}", flat)
            unit.write_shaped(k, name, flat) if name in shaped else unit.write_part(name, k, flat)
    if name == "master" and isinstance(home, Stacked):
        increment_version(parameter)


def _home(parameter: nn.Parameter, call: str) -> Place | Stacked:
    """The home of a sharded parameter. Raises ZeroError where its values cannot be read now."""
    home = parameter.__dict__.get("_zero_home")
    if not isinstance(home, (Place, Stacked)) or not home.is_of(parameter):
        raise ZeroError(
            f"{call}() of a tensor of shape {tuple(parameter.shape)} that is not a parameter of a sharded model: give "
            "it one of model.parameters() after zero_core.shard(model, optimizer). A plain parameter p has its values "
            "in p, and its gradient in p.grad"
        )
    if (why := home.engine.refusal()) is not None:
        raise ZeroError(f"{call}() of {home.name} {why}")
    return home


def _state_home(parameter: nn.Parameter, name: str, call: str) -> Place | Stacked:
    home = _home(parameter, call)
    shaped = home.unit.shaped(home.index) if isinstance(home, Place) else {}
    names = (*home.unit.store.state_names(), *shaped)
    if name not in names:
        raise ZeroError(
            f"{call}({name!r}) of {home.name}: the states of this parameter are {', '.join(names)}. Its step count "
            f"is zero_core.units(model)[{home.places[0].unit.index}].steps[{home.places[0].index}]"
        )
    if name == "master" and any(place.unit.groups[place.index] is None for place in home.places):
        raise ZeroError(
            f"{call}('master') of {home.name}, which is not trained and has no master: its values are "
            "parameter.detach().float(), and parameter.copy_(values) writes them"
        )
    return home


def _wide(call: str, home: Place | Stacked, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The values in fp32 on the model's device."""
    if tuple(values.shape) != shape or values.is_complex():
        raise ZeroError(
            f"{call}() of {home.name} was given values of shape {tuple(values.shape)} and dtype {values.dtype}: give "
            f"values of shape {shape} and of a dtype that is not complex, on every rank"
        )
    return values.detach().to(home.unit.ranks.device, torch.float32)

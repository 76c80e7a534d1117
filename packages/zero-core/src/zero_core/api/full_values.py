"""Reads and overwrites one parameter's full gradient, fp32 master or optimizer state between two steps.

Owns when each of them can be had, and the way from shards to one tensor and back. All four functions are collective.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..errors import GradientError, ZeroError
from ..hooks.parameter_access import Place
from ..unit_memory.stacked_parameter import Stacked


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
    home = _home(parameter, "full_gradient")
    return home.join(lambda place: place.engine.gradients.read(place.unit, place.index))


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
    parts = home.cut(_wide(home, values, home.shape))
    if not all([place.engine.gradients.write(place.unit, place.index, rows.reshape(-1)) for place, rows, _ in parts]):
        raise GradientError(
            f"set_full_gradient() of {home.name}, which has no gradient to overwrite: no backward reached it since "
            "the last zero_grad(), or it is frozen. Call it between backward() and step()"
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
    wide = _wide(home, values, shaped.get(name, home.shape))
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
            "it one of model.parameters() after zero_core.shard(model, optimizer). An unsharded one has its values, "
            "and its gradient in .grad"
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
            f"{call}({name!r}) of {home.name}: the optimizer keeps {', '.join(names)} of each element. Its step count "
            "is in .steps of its unit, see zero_core.units(model)"
        )
    if name == "master" and any(place.unit.groups[place.index] is None for place in home.places):
        raise ZeroError(
            f"{call}('master') of {home.name}, which is not trained and has no master: its values are "
            "parameter.detach().float(), and parameter.copy_(values) writes them"
        )
    return home


def _wide(home: Place | Stacked, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The values in fp32 on the model's device."""
    if tuple(values.shape) != shape or values.is_complex():
        raise ZeroError(
            f"{values.dtype} values of shape {tuple(values.shape)} for {home.name} of shape {shape}: give "
            "real numbers for the whole parameter, on every rank"
        )
    return values.detach().to(home.unit.ranks.device, torch.float32)

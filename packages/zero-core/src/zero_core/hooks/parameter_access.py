"""Connects a model to its units, and disconnects it: hooks, each parameter's values and gradient, state dicts.

Owns a parameter's place, and the hooks of `state_dict()` and `load_state_dict()`: each unit is gathered once, and
values are copies. Not here: the other hooks (in attach_hooks.py), parameters' classes (in unit_memory/unit.py), a call
that rank 0 makes alone (in comm/watchdog.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..active_calls import outside_transforms
from ..errors import ChangedParameterError, GradientError, ShardedParameterError, ZeroError
from ..gradients.gradient_access import USED_UP
from ..tensors.inner_tensors import named_parts, parts_of
from ..tensors.native_functions import replace_natives
from ..tensors.parameter_home import Home, ParameterCopy, home_of, set_home
from ..tensors.refusals import allow_copies
from ..tensors.sharded_parameter import Sharded, sharded_class
from ..tensors.version_counters import Version
from ..tensors.writeback_views import View
from ..unit_memory.stacked_parameter import Stacked
from ..unit_memory.unit import Unit
from ..unit_memory.unit_gradient import Leftover
from .engine import Engine


class Place(Home):
    """A `parameter_home.Home`: parameter `index` of `unit`."""

    def __init__(self, engine: Engine, unit: Unit, index: int) -> None:
        self.engine, self.unit, self.index, self.name = engine, unit, index, unit.layout.slots[index].name

    def is_of(self, parameter: Tensor) -> bool:
        """Whether this is the parameter itself, and no tensor over its memory, which has no gradient."""
        return parameter is self.unit.parameters[self.index]

    def full_copy(self, parameter: Tensor) -> Tensor:
        return self.engine.copies.full(self.unit, self.index)

    def write_back(self, parameter: Tensor, values: Tensor, uncounted: Tensor | None) -> None:
        self.engine.copies.write(self.unit, self.index, values, uncounted, changed=True)

    def overwrite(self, parameter: Tensor, values: Tensor) -> bool:
        self.engine.ranks.meet(f"copy_() into {self.name}")
        self.engine.copies.write(self.unit, self.index, values, parameter)
        return True

    def take_values(self, parameter: Tensor, values: Tensor) -> None:
        if not self.is_of(parameter):
            raise ChangedParameterError(
                f"tensor.data = values on a tensor that shares the memory of {self.name} would end the sharing, but "
                "shards keep it. Assign the values to the attribute that holds the tensor: module.name = values"
            )
        self.engine.copies.write(self.unit, self.index, values, None)  # torch counts no p.data = values
        self.engine.writes.given(self.name, values, trained=self.unit.trainable)

    def versions(self, parameter: Tensor) -> list[Version]:
        return [self.unit.versions[self.index]]

    def note_external_use(self, parameter: Tensor) -> None:
        self.engine.note_external_use(self.unit)

    def held_gradient(self, parameter: Tensor) -> Place | None:
        return self if self.is_of(parameter) and self.unit.gradient.holds(self.index) else None

    def drop_gradient(self, parameter: Tensor) -> None:
        if self.is_of(parameter):
            self.engine.drop_gradient(self.unit, self.index)

    # -- as `stacked_parameter.Stacked`, of a parameter in one piece ---------------------------------------------------

    @property
    def places(self) -> list[Place]:
        """Of the parameter's rows, if it is cut into these; else this one."""
        return [self]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unit.layout.slots[self.index].shape

    def cut(self, whole: Tensor) -> Iterator[tuple[Place, Tensor, Any]]:
        yield self, whole, self.unit.parameters[self.index]

    def join(self, values: Callable[[Place], Tensor | None]) -> Tensor | None:
        return values(self)

    # -- for `grad_proxy.HeldGradient` ---------------------------------------------------------------------------------

    @property
    def gradient_version(self) -> Version:
        """The version that changes with this gradient. It ends at each step or zero_grad()."""
        return self.unit.gradient.versions[self.index]

    def multiply_gradient(self, factor: Tensor | float) -> None:
        """Multiply it by a number, or by a tensor of one element, before the step at the latest."""
        self.engine.gradients.factors.multiply((self.unit.index, self.index), factor)
        self.gradient_version.wrote()

    def gradient(self) -> Tensor:
        """A copy, fp32, of the parameter's shape."""
        values = self.engine.gradients.read(self.unit, self.index)
        if values is None:  # of several ranks none has one, which was not known when `p.grad` was asked for
            return torch.zeros(self.unit.layout.slots[self.index].shape, device=self.engine.ranks.device).float()
        return values

    def overwrite_gradient(self, values: Tensor) -> None:
        """Let `values`, of the parameter's shape, be the gradient."""
        flat = values.to(self.engine.ranks.device, torch.float32).reshape(-1)
        if not self.engine.gradients.write(self.unit, self.index, flat):
            raise GradientError(f"{self.name} has no gradient to overwrite, on any rank: p.grad is None in plain torch")

    @staticmethod
    def power_sum(places: Sequence[Place], order: float) -> float:
        """The sum of |g| ** order over the gradients of `places`; of order inf their largest |g|."""
        keys: dict[Engine, list[tuple[int, int]]] = {}
        for place in places:
            keys.setdefault(place.engine, []).append((place.unit.index, place.index))
        sums = [engine.gradients.power_sum(found, order) for engine, found in keys.items()]
        return max(sums) if order == math.inf and not any(map(math.isnan, sums)) else sum(sums)

    def refuse(self, operation: str) -> str | None:
        """Why `operation` is refused for this gradient, and the call to use instead. None: it is not."""
        engine = self.engine
        if "unscale" in operation and engine.loss_scale is not None:  # torch.amp.GradScaler
            return "loss_scale=, given to zero_core.shard, scales the loss already. Leave the GradScaler out"
        if operation.rpartition(".")[2].endswith("zero_"):
            return "the gradient's shards are freed, not zeroed. Call optimizer.zero_grad() instead"
        if engine.reducer.updates:
            return f"the gradient {USED_UP}"
        if self.unit.gradient.leftover[self.index] is Leftover.STEPPED:
            return "step() has used up the gradient; call optimizer.zero_grad() after each step()"
        return engine.refusal()


class Left(Place):
    """A `parameter_home.Home` of a tensor that was not in the model any more when it was sharded again: it has no
    values.
    """

    def full_copy(self, parameter: Tensor) -> Tensor:
        kind = type(self.engine.model).__name__
        raise ShardedParameterError(
            f"the values of {self.name} were lost when the {kind} was sharded again without the module that had them: "
            "build the module again. Next time, call zero_core.unshard or p.detach().clone() before you remove a module"
        )

    def overwrite(self, parameter: Tensor, values: Tensor) -> bool:
        return False

    def take_values(self, parameter: Tensor, values: Tensor) -> None:
        self.full_copy(parameter)

    def held_gradient(self, parameter: Tensor) -> None:
        return None

    def drop_gradient(self, parameter: Tensor) -> None:
        """No-op: it has no gradient."""


def places_of(module: nn.Module) -> list[Place]:
    """Where the parameters of a module are, part by part or row by row; those that are not sharded are left out."""
    found = [part.tensor.__dict__.get("_zero_home") for part in named_parts(module)]
    return [place for home in found if home is not None for place in home.places]


def sharded_places(module: nn.Module) -> list[Place]:
    """As `places_of`. Raises ZeroError if there are none."""
    places = places_of(module)
    if not places:
        raise ZeroError(f"{type(module).__name__} has no sharded parameter: call zero_core.shard first")
    return places


def connect(engine: Engine) -> None:
    """The parameters, which are the units' already, say where they live, and the hooks are on the model."""
    replace_natives()
    for unit in engine.units:
        for k, parameter in enumerate(unit.parameters):
            set_home(parameter, Place(engine, unit, k))
        for k, follower in unit.followers:
            set_home(follower.tensor, home_of(unit.parameters[k]))
        for composite in unit.composites:
            set_home(composite.parameter, composite)
    opened = {id(node.module): node.units for node in engine.nodes}
    handles = engine.attachment.handles  # which go when the engine is detached
    handles += engine.stacks.connect(partial(_choose, engine), opened)
    engine.attach()
    handles += Snapshots(engine).attach(engine.model)


def _choose(engine: Engine, groups: Sequence[Sequence[int]], routed: list[bool]) -> list[bool]:
    """Which groups of experts a forward calls, of the numbers of their units and whether this rank has tokens for each:
    where no backward can follow, those that any rank has tokens for. Collective then."""
    ranks, forward = engine.ranks, engine.evaluation
    if forward is None:
        return [True] * len(routed)
    if ranks.size > 1:
        routed = ranks.anywhere(routed, "experts with tokens")
    forward.forecast.tell([u for units, wanted in zip(groups, routed, strict=True) if wanted for u in units])
    return routed


def disconnect(engine: Engine) -> None:
    """Takes hooks and refusals off the model, and gives parameters their earlier classes. They have no memory, and keep
    their homes until they are plain again."""
    engine.attachment.detach()
    for module in engine.model.modules():
        allow_copies(module)
    for unit in engine.units:
        unit.unseal()
        for composite in unit.composites:
            composite.give_back(plain=False)
    engine.stacks.disconnect()


def leave_behind(engine: Engine) -> None:
    """Makes the parameters that are still in these shards unusable: their memory is gone. Others, which moved to new
    shards or back to the user, are left alone."""
    for unit in engine.units:
        for tensor, k, kind in unit.tensors():
            if getattr(tensor.__dict__.get("_zero_home"), "engine", None) is engine:
                set_home(tensor, Left(engine, unit, k))
                tensor.__class__ = sharded_class(kind)
        for composite in unit.composites:
            if composite.parameter.__dict__.get("_zero_home") is composite:
                composite.close(unit.index)
    engine.stacks.leave_behind()


class _Snapshot(ParameterCopy):
    """Values of a state dict that was taken while the parameter had memory, as inside `gathered`."""

    def __init__(self, name: str, parameter: Tensor, values: Tensor) -> None:
        super().__init__(parameter, values)
        self._name = name

    def check(self) -> None:
        raise ChangedParameterError(
            f"{self._name} of a state dict was written. The state dict is a copy, because it was taken inside "
            "zero_core.gathered, forward or backward: write into the parameter itself, or call load_state_dict(state)"
        )


class Snapshots:
    """The state dicts of one sharded model. Calls nest, module by module; the outermost gathers for all inside it."""

    def __init__(self, engine: Any) -> None:
        self._engine: Engine = engine
        self._outermost: nn.Module | None = None

    def __reduce__(self) -> Any:
        """Lets a copy or pickle of a module go on to its parameters, which raise with the reason."""
        return Snapshots, (None,)

    def attach(self, model: nn.Module) -> list[Any]:
        """Puts the hooks on every module with sharded parameters inside. Returns their handles."""
        handles: list[Any] = []
        for module in model.modules():
            if places_of(module):
                handles.append(module.register_state_dict_pre_hook(self._begin))
                handles.append(module.register_state_dict_post_hook(partial(self._end)))  # torch puts a mark on it
                handles.append(module.register_load_state_dict_pre_hook(_refuse_assignment))
        return handles

    @outside_transforms
    def _begin(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if keep_vars or (self._outermost is not None and self._outermost is not module):
            return  # the caller wants the parameters themselves; or the outermost module has gathered these
        wanted: dict[int, list[int]] = {}
        for place in places_of(module):
            if place.unit.users == 0 and place.index not in wanted.setdefault(place.unit.index, []):
                wanted[place.unit.index].append(place.index)
        engine = self._engine
        engine.copies.taken.clear()
        gathers = any(not engine.units[u].residency.unsharded for u in wanted)
        if gathers and engine.ranks.shard.size > 1 and not engine.busy:
            engine.ranks.patience.assemble(f"{type(module).__name__}.state_dict()")
        engine.copies.take(wanted)
        self._outermost = module

    def _end(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in module._parameters:  # the caller keeps the values: they may be read when they are out of date
            if isinstance(value := state.get(prefix + name), View):
                state[prefix + name] = View(value, value.copy, kept=True)
        if self._outermost is not module:
            return
        self._outermost = None
        self._engine.copies.taken.clear()
        for name, parameter in _open(module, prefix):
            value = state.get(name)
            if isinstance(value, Tensor) and value is not parameter:
                values = value.clone()
                plain = type(values) is Tensor
                state[name] = View(values, _Snapshot(name, parameter, values), kept=True) if plain else values


def _open(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields sharded parameters that have memory now, which is taken away later."""
    for name, parameter in module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if not isinstance(parameter, Sharded):
            homes = [part.__dict__.get("_zero_home") for part in parts_of(parameter).values()]
            if any(isinstance(home, (Place, Stacked)) for home in homes):
                yield name, parameter


def _refuse_assignment(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *lists: Any) -> None:
    if not metadata.get("assign_to_params_buffers"):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and prefix + name in state and parameter.__dict__.get("_zero_home") is not None:
            raise ShardedParameterError(
                f"load_state_dict(assign=True) would put another tensor in the place of {prefix + name}, which is "
                "sharded: leave assign at False, which copies the values into the shards"
            )

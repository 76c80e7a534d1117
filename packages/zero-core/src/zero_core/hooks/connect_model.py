"""Connects a model to its units, and disconnects it: hooks, each parameter's access to values, state dicts.

Owns the hooks of `state_dict()` and `load_state_dict()`: each unit is gathered once, and values are copies. Not here:
the other hooks (in attach_hooks.py), parameters' classes (in unit_memory/unit.py), a parameter's place (in
parameter_access.py), a call that rank 0 makes alone (in comm/watchdog.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..errors import ChangedParameterError, ShardedParameterError
from ..tensors.inner_tensors import parts_of
from ..tensors.module_outputs import outside_transforms
from ..tensors.native_functions import replace_natives
from ..tensors.parameter_home import ParameterCopy, home_of, set_home
from ..tensors.refusals import allow_copies
from ..tensors.sharded_parameter import Sharded, sharded_class
from ..tensors.writeback_views import View
from ..unit_memory.stacked_parameter import Stacked
from .engine import Engine
from .parameter_access import Left, Place, places_of


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
            f"{self._name} of a state dict was written, which is a copy, as the state dict was taken inside "
            "zero_core.gathered, forward or backward: write into the parameter itself, or load_state_dict(state)"
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
        if self._outermost is not module:
            return
        self._outermost = None
        self._engine.copies.taken.clear()
        for name, parameter in _open(module, prefix):
            value = state.get(name)
            if isinstance(value, Tensor) and value is not parameter:
                state[name] = _copied(name, parameter, value)


def _open(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields sharded parameters that have memory now, which is taken away later."""
    for name, parameter in module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
        if not isinstance(parameter, Sharded):
            homes = [part.__dict__.get("_zero_home") for part in parts_of(parameter).values()]
            if any(isinstance(home, (Place, Stacked)) for home in homes):
                yield name, parameter


def _copied(name: str, parameter: Any, value: Tensor) -> Tensor:
    values = value.clone()
    if type(values) is not Tensor:
        return values
    return View(values, _Snapshot(name, parameter, values), kept=True)


def _refuse_assignment(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *lists: Any) -> None:
    if not metadata.get("assign_to_params_buffers"):
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and prefix + name in state and parameter.__dict__.get("_zero_home") is not None:
            raise ShardedParameterError(
                f"load_state_dict(assign=True) would put another tensor in the place of {prefix + name}, which is "
                "sharded: leave assign at False, which copies the values into the shards"
            )

"""Connects a model to its units, and disconnects it again: the hooks, and the place of each parameter.

Owns neither. Not here: the hooks (in attaching.py and snapshots.py), parameters' classes (in unit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from .home import home_of, set_home
from .hooks import Engine
from .native import replace_natives
from .parameter import sharded_class
from .place import Left, Place
from .refusals import allow_copies
from .snapshots import Snapshots

__all__ = ["connect", "disconnect", "leave_behind"]


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

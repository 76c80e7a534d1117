"""A model and its units brought together, and taken apart again: hooks, and where each parameter lives.

Owns neither: the hooks are `attaching`'s, `fast_paths`' and `snapshots`', the classes of parameters are `unit`'s.
"""

from __future__ import annotations

from .hooks import Engine
from .parameter import allow_copies, home_of, set_home
from .place import Place, Window
from .snapshots import Snapshots

__all__ = ["connect", "disconnect"]


def connect(engine: Engine) -> None:
    """The parameters, which are the units' already, say where they live, and the hooks are on the model."""
    for unit in engine.units:
        for k, parameter in enumerate(unit.parameters):
            set_home(parameter, Place(engine, unit, k))
        for k, follower in unit.followers:
            home = home_of(unit.parameters[k])
            set_home(follower.tensor, home if follower.whole else Window(engine, unit, k, follower))
        for composite in unit.composites:
            set_home(composite.parameter, composite)
    engine.attach()
    engine.keep_attached(Snapshots(engine).attach(engine.model))


def disconnect(engine: Engine) -> None:
    """No hook or refusal is on the model, and parameters have the classes that they had. They have no memory, and keep
    their homes until they are the user's again."""
    engine.detach()
    for module in engine.model.modules():
        allow_copies(module)
    for unit in engine.units:
        unit.unseal()
        for composite in unit.composites:
            composite.give_back(plain=False)

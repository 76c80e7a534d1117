"""`uneven`: inside a `with`, ranks may run different numbers of forwards. Collective; what ranks say is `rounds`'s."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch import nn

from .errors import CollectiveError, ZeroError
from .runtime.hooks import Engine
from .runtime.place import sharded_places
from .runtime.rounds import Rounds
from .runtime.unit import Unit

__all__ = ["uneven"]


@contextmanager
def uneven(*models: nn.Module) -> Iterator[None]:
    """Inside, ranks may run different forwards of `models`, and different numbers of them, none too: generation of
    unequal length, evaluation of uneven batches.

    models: every sharded model that the block runs, or modules that contain one. Collective: every rank enters the
    block, in which forwards run under torch.no_grad() or inference_mode(). A rank that leaves it takes part in the
    gathers of the others until all are done, with the memory of one unit and of `prefetch_bytes`. On several ranks a
    forward costs one more all-reduce of a few numbers, which the host waits for, and the first one such an all-reduce
    for each unit. On one rank, and at stage 0, nothing is sent.

    Where one rank leaves the block by an exception, the others raise CollectiveError in their next forward, or while
    they wait. Raises ZeroError for a module without sharded parameters, and inside itself or a forward; inside the
    block for a forward with gradients, a backward, a step, a checkpoint, `gathered`, and models that were not named.
    """
    engines = _engines(models)
    Rounds.entered = rounds = Rounds(engines)
    unsharded: dict[Engine, set[Unit]] = {}
    try:
        for engine in rounds.members:
            unsharded[engine] = engine.uses.enter_uneven()
        yield
        rounds.serve()
    except BaseException as error:
        for engine in engines:
            engine.orders.clear()  # ranks may have learned different ones
        if isinstance(error, Exception) and not isinstance(error, CollectiveError):  # else the others know, or cannot
            with suppress(ZeroError):
                rounds.fail()
        raise
    finally:
        Rounds.entered = None
        for engine, units in unsharded.items():
            engine.leave_uneven(units)


def _engines(models: tuple[nn.Module, ...]) -> list[Engine]:
    found: dict[Engine, None] = {}
    for model in models:
        found.update((place.engine, None) for place in sharded_places(model))
    if Rounds.entered is not None:
        raise ZeroError("zero_core.uneven inside itself: name all models in one block, zero_core.uneven(a, b)")
    if not found:
        raise ZeroError("zero_core.uneven() without a model: name those that the block runs, zero_core.uneven(model)")
    if any(engine.busy for engine in found):
        raise ZeroError("zero_core.uneven inside forward or backward: open it around the call of the model")
    return list(found)

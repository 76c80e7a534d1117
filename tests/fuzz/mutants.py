"""The bugs that the fuzzer must find, put back: each mutant undoes one repair while a program runs."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.fuzz.program import Program
from tests.fuzz.run import Outcome, execute
from zero_core.api import shard
from zero_core.gradients.reducer import Reducer
from zero_core.hooks.attach_hooks import FastPaths, _Collector
from zero_core.hooks.backward_pass import Recomputations
from zero_core.hooks.engine import Engine
from zero_core.hooks.saved_tensors import Asking
from zero_core.model import unit_plan
from zero_core.model.aliases import Overlaps
from zero_core.optim.state_names import Options
from zero_core.tensors import sharded_parameter as parameter
from zero_core.tensors import version_counters, writeback_views
from zero_core.tensors.writeback_views import View
from zero_core.unit_memory.unit import Unit
from zero_core.unit_memory.unit_gradient import UnitGradient
from zero_core.unit_memory.write_checks import Watch


def _overwriting(reducer: Reducer, unit: Unit) -> None:
    """`Reducer._reduce` that starts the next reduction before it finishes the one of the same unit."""
    if reducer.ranks.size == 1 and unit.gradient.current is None:
        return
    reduction = unit.gradient.reduce()
    reducer.finish()
    reducer._under_way = reduction, None
    if reducer.ranks.size == 1:
        reducer.finish()


def _at_once(reducer: Reducer, unit: Unit) -> None:
    """`Reducer.reduce_unit_late` that reduces what came late at once."""
    if unit.gradient.current is not None:
        reducer.reduce_unit(unit)


def _computed(module: Any) -> int:
    """`unit_plan._own_numel` that evaluates the weight of a parametrised module."""
    return int(module.weight.numel())


def _patched(*patches: tuple[Any, str, Any]) -> Callable[[], list[Any]]:
    return lambda: [mock.patch.object(*each) for each in patches]


_WITH_VIEWS = writeback_views._with_views


def _but_for_detach(func: Any, result: Any, copies: Any, **how: Any) -> Any:
    return result if func is Tensor.detach else _WITH_VIEWS(func, result, copies, **how)


def _above_autograd(cls: type[View], func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """`View.__torch_function__` that gives a function's graph throw-away aliases, which a leaf knows nothing of."""
    with torch._C.DisableTorchFunctionSubclass():
        if getattr(func, "__name__", "") != "backward":
            args, kwargs = tree_map_only(View, lambda view: view.detach(), (args, kwargs or {}))
        return func(*args, **kwargs or {})


_AFTER_ACCUMULATION = Tensor.register_post_accumulate_grad_hook
_SPECIAL = {_AFTER_ACCUMULATION, Tensor.view_as, Tensor.expand_as}


def _take(collector: _Collector, parameter: Tensor) -> None:
    """`_Collector.__call__` that does not ask whether a hook comes after it."""
    collect, unit = collector.collect(), collector.unit()
    if collect is not None and unit is not None:
        collect(unit, collector.k)


def _unmended(engine: Engine, what: str) -> None:
    """`Engine.mend` that a new forward needs, and nothing else."""
    engine.calls.interrupted = False
    if what == "forward" and engine._stack and engine.calls.over("forward"):
        engine._abandon_forward()


MUTANTS: dict[str, Callable[[], list[Any]]] = {
    "a gradient is lost": _patched((Reducer, "_reduce", _overwriting), (Reducer, "reduce_unit_late", _at_once)),
    "writes in forward are lost": _patched(
        (Watch, "was_written", lambda watch: False), (Watch, "unseen_write", lambda watch: None)
    ),
    "writes through detach are lost": _patched((writeback_views, "_with_views", _but_for_detach)),
    "changes before a backward are not seen": _patched((version_counters, "increment_version", lambda tensor: None)),
    "shard evaluates weights": _patched((unit_plan, "_own_numel", _computed)),
    "shared memory is not seen": _patched((shard, "overlaps_of", lambda model, optimized: Overlaps([], [], []))),
    "hooks put on after shard are lost": _patched(
        (parameter, "_SPECIAL", {k: v for k, v in parameter._SPECIAL.items() if k not in _SPECIAL}),
        (parameter, "METADATA", parameter.METADATA | {_AFTER_ACCUMULATION}),
        (_Collector, "__call__", _take),
    ),
    "changed options are not seen": _patched((Options, "check", lambda options: None)),
    "padding is not zeroed": _patched((FastPaths, "attach", lambda paths, model, nodes: [])),
    "an interrupt is not mended": _patched(
        (Engine, "mend", _unmended), (UnitGradient, "_left", lambda gradient, **how: [])
    ),
    "the graph does not ask for its parameters": _patched((Asking, "around", lambda asking, call: call)),
    "views are above autograd": _patched((View, "__torch_function__", classmethod(_above_autograd))),
    "views are not dispatched": _patched((View, "__torch_dispatch__", torch._C._disabled_torch_dispatch_impl)),
    "a backward in a backward finds no memory": _patched((Recomputations, "open", lambda inside, visit: None)),
}


def _run(name: str, program: Program, folder: str) -> Outcome:
    with ExitStack() as stack:
        for patch in MUTANTS[name]():
            stack.enter_context(patch)
        return execute(program, folder)


def runner(name: str) -> Callable[[Program, str], Outcome]:
    """What runs a program on a rank with this bug in the library.

    Raises AttributeError where the library no longer has what it replaces, which on a rank would pass for a find.
    """
    with ExitStack() as stack:
        for patch in MUTANTS[name]():
            stack.enter_context(patch)
    return partial(_run, name)

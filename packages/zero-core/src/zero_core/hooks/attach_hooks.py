"""Attaches the hooks on a model's modules and parameters, and checks that it still has the sharded parameters.

Owns the hooks' handles, and the hooks of modules that read their children's parameters themselves, as torch's do in
eval mode (`FastPaths`). Not here: the work of the other hooks (in engine.py).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..active_calls import Calls, mended, not_traced, outside_transforms, refuse_tracing, tensors_of, unwrapped
from ..errors import ChangedParameterError, GradientError
from ..tensors.inner_tensors import repacks_in_eval
from ..tensors.refusals import refuse_copies, refuse_scripts
from ..unit_memory.residency_policy import Uses
from ..unit_memory.stacked_parameter import Stacks, hooked
from ..unit_memory.unit import Unit
from .saved_tensors import Asking


@dataclasses.dataclass(frozen=True)
class Node:
    """A module that opens units. foreseen: a forward is expected to call it if the last one did."""

    index: int
    name: str
    module: nn.Module
    units: tuple[int, ...]
    foreseen: bool = True


@dataclasses.dataclass(frozen=True)
class _Collector:
    """Reports a complete gradient. Its references are weak: Python's collector does not see through a hook that
    autograd holds, and a model that leads back to itself through one is never freed."""

    collect: weakref.WeakMethod[Callable[[Unit, int], None]]
    unit: weakref.ref[Unit]
    k: int
    takes_gradient: ClassVar[bool] = True  # `parameter` keeps it the last of a parameter's hooks

    def __call__(self, parameter: Tensor) -> None:
        """parameter: torch passes the result of the hook before this one, if that returned anything."""
        collect, unit = self.collect(), self.unit()
        if collect is None or unit is None:
            return  # model and optimizer are gone, and nothing can step with it
        name, hooks = unit.layout.slots[self.k].name, unit.parameters[self.k]._post_accumulate_grad_hooks
        last: Any = next(reversed(hooks.values()))
        if last is not self:
            raise GradientError(
                f"the post_accumulate_grad hook {getattr(last, '__qualname__', last)!r} was registered on {name} in "
                "a forward or inside zero_core.gathered. It would find no gradient, because gradients have moved to "
                "the shards before it runs. Register it outside of both, before or after zero_core.shard"
            )
        if len(hooks) > 1 and unit.gradient.used[self.k]:
            first: Any = next(iter(hooks.values()))
            raise GradientError(
                f"the post_accumulate_grad hook {getattr(first, '__qualname__', first)!r} on {name} would see the "
                "gradient of this backward only. In torch it sees the sum since zero_grad(), but earlier gradients "
                "have moved to the shards. Remove the hook, and read the sum with zero_core.full_gradient before "
                "step(). To change the sum, use zero_core.set_full_gradient. Or call backward() once in each step"
            )
        collect(unit, self.k)


class _Replaced:
    """Replaces the function that calls a module and its hooks by `by(call)`; a handle to restore it."""

    def __init__(self, module: nn.Module, by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._module = module
        self._name = "_call_impl" if module._compiled_call_impl is None else "_compiled_call_impl"
        self._before, self._own = getattr(module, self._name), module.__dict__.get(self._name)
        self._call = module.__dict__[self._name] = by(self._before)

    def remove(self) -> None:
        own = self._module.__dict__
        if own.get(self._name) is self._call:
            del own[self._name]
            if self._own is not None:
                own[self._name] = self._own


def _refuse_repacking(path: str, module: Any, args: Any) -> None:
    """Raises where bitsandbytes would replace the weight's bytes and round its scales, as on some processors."""
    if module.training or not module.support_avx512bf16_for_cpu or not args:
        return
    if args[0].device.type == "cpu" and not args[0].requires_grad:
        raise ChangedParameterError(
            f"{path} is in eval mode, where bitsandbytes would repack 4-bit weights for avx512_bf16 and round their "
            "scales permanently, which shards cannot follow. Before the forward, set "
            "support_avx512bf16_for_cpu = False on every Linear4bit: in eval mode it then computes as in training"
        )


class Attachment:
    """The hooks on one sharded model, and the parameters that it had when it was sharded."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], optimized: Container[int], stacks: Stacks) -> None:
        self._model, self._units, self._stacks = model, units, stacks
        frozen = [unit for unit in units if not unit.trainable]
        named = [(slot.whole.name, p) for u in frozen for slot, p in zip(u.layout.slots, u.wholes, strict=True)]
        named += [(each.name, each.parameter) for unit in frozen for each in unit.composites]
        self._untrained = [(name, p) for name, p in named if id(p) in optimized]
        mine = {id(p) for unit in units for p in (*unit.wholes, *(each.parameter for each in unit.composites))}
        self._owners = [
            (f"{path}.{key}".lstrip("."), module, key, parameter)
            for path, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if id(parameter) in mine
        ]
        self.handles: list[Any] = []

    def attach(
        self,
        nodes: Sequence[Node],
        before: Callable[..., Any],
        after: Callable[..., Any],
        collect: Callable[[Unit, int], None],
        asking: Asking | None,
    ) -> None:
        """Calls `before` and `after` around each node's forward, with the node, and `collect` with a unit and the
        number of its parameter whose gradient is complete. asking: its hooks are in force in these forwards."""
        for node in nodes:
            self.handles += [
                node.module.register_forward_pre_hook(not_traced(partial(before, node)), prepend=True),
                node.module.register_forward_hook(not_traced(partial(after, node)), always_call=True),
            ]
            if asking is not None:
                self.handles.append(_Replaced(node.module, asking.around))
            refuse_copies(node.module)
            refuse_scripts(node.module)
        for path, module in self._model.named_modules():
            if repacks_in_eval(module):
                self.handles.append(module.register_forward_pre_hook(partial(_refuse_repacking, path)))
        for module in {id(module): module for _, module, _, _ in self._owners}.values():
            refuse_scripts(module)
        for stacked in self._stacks.parameters:
            self.handles += stacked.attach(weakref.WeakMethod(collect))
        for unit in self._units:
            for k, parameter in enumerate(unit.parameters):
                if unit.groups[k] is None:
                    continue
                self.handles.append(hooked(parameter, _Collector(weakref.WeakMethod(collect), weakref.ref(unit), k)))

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def check(self, module: nn.Module) -> None:
        """Raises if `module` is traced, or if it is the model and has another parameter where one was sharded."""
        refuse_tracing()
        for name, owner, key, parameter in self._owners if module is self._model else ():
            found = owner._parameters.get(key)
            if found is parameter or (found is not None and not isinstance(unwrapped(found), nn.Parameter)):
                continue  # torch.func.functional_call puts plain tensors there, which need no unit's memory
            raise ChangedParameterError(
                f"{name} is not the parameter that was sharded: it was replaced, or its module moved or exported, "
                "after zero_core.shard. Do that before shard. To change values, write them inside zero_core.gathered. "
                "For torch.func.functional_call, pass plain tensors: {name: parameter.detach()}"
            )

    def check_added(self, module: nn.Module) -> None:
        """Raises if `module` has a parameter that came after `shard` and requires a gradient: no rank averages it."""
        for parameter in map(unwrapped, module.parameters()):
            if not isinstance(parameter, nn.Parameter):
                continue  # torch.func.functional_call's
            if parameter.__dict__.get("_zero_home") is None and parameter.requires_grad:
                name = next(name for name, p in self._model.named_parameters() if p is parameter)
                raise ChangedParameterError(
                    f"{name} was added to the model after zero_core.shard and requires a gradient. Its gradient is not "
                    "averaged over the ranks, so each rank would train it differently. Add it before shard, and give "
                    "it to shard's optimizer. Or freeze it with requires_grad_(False). Or run it in torch.no_grad()"
                )

    def check_trained(self) -> None:
        """Raises if a parameter of the optimizer requires a gradient now that did not when it was sharded."""
        with torch._C.DisableTorchFunctionSubclass():
            found = next((name for name, parameter in self._untrained if parameter.requires_grad), None)
        if found is not None:
            raise ChangedParameterError(
                f"{found} requires a gradient, and did not in zero_core.shard, so step() would not train it. Before "
                "zero_core.shard, call requires_grad_(True) on each parameter that will be trained at any time (with "
                "PEFT: model.set_requires_grad([names of adapters])). After zero_core.shard, requires_grad_ (PEFT: "
                "set_adapter) may freeze and unfreeze these. For a forward without training, use torch.no_grad()"
            )


class FastPaths:
    """The fast paths of one sharded model. mend: the engine's method."""

    def __init__(self, units: Sequence[Unit], uses: Uses, calls: Calls, mend: Callable[[str], None]) -> None:
        self._units, self._uses, self.calls, self._mend = units, uses, calls, mend
        self._holding: list[nn.Module] = []

    def attach(self, model: nn.Module, nodes: Sequence[Node]) -> Iterator[Any]:
        """Puts the hooks on these modules, after those of the nodes. Yields their handles."""
        for module, units in _looking_inside(model, nodes):
            before, after = not_traced(partial(self._hold, units)), not_traced(partial(self._release, units))
            yield module.register_forward_pre_hook(before, with_kwargs=True)
            yield module.register_forward_hook(after, always_call=True)

    @mended
    @outside_transforms
    def _hold(self, units: Sequence[int], module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keeps the units unsharded in a fast path. Where autograd will record a graph the module takes none, and its
        reads have to be noted as uses from outside."""
        if module.training:
            return
        used = (*tensors_of((args, kwargs)), *(p for u in units for p in self._units[u].parameters))
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in used):
            return
        if self.calls.interrupted:  # no hook of a unit has been called yet, which would mend it
            self._mend("forward")
        self._holding.append(module)
        for u in units:
            self._units[u].enter()

    @mended
    def _release(self, units: Sequence[int], module: nn.Module, args: Any, output: Any) -> None:
        if self._holding and self._holding[-1] is module:
            self._holding.pop()
            self._uses.release(units, evict=torch.is_grad_enabled())

    def forget(self) -> None:
        """Forgets the modules under way, after a forward that failed or was interrupted."""
        self._holding.clear()


def _looking_inside(model: nn.Module, nodes: Sequence[Node]) -> Iterator[tuple[nn.Module, list[int]]]:
    """Yields such modules, and the units that the modules inside of them open.

    Before torch takes a fast path, which zeroes padded positions, it asks whether any of these parameters is of a
    subclass of Tensor, as they are between uses.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and len(module.layers):
            inside = {id(each) for each in module.layers[0].modules()}
        elif isinstance(module, nn.MultiheadAttention):
            inside = {id(each) for each in module.modules() if each is not module}
        else:
            continue
        if units := [u for node in nodes if id(node.module) in inside for u in node.units]:
            yield module, units

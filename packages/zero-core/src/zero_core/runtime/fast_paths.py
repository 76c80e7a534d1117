"""Keeps units unsharded while a module around theirs reads their parameters itself, as torch's do in eval mode.

Owns which modules do that, and which of them are under way. Not here: gathering and resharding (in uses.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .attaching import Node
from .calls import Calls, mended
from .outputs import not_traced, outside_transforms, tensors_of
from .unit import Unit
from .uses import Uses

__all__ = ["FastPaths"]


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
        units = [u for node in nodes if id(node.module) in inside for u in node.units]
        if units:
            yield module, units

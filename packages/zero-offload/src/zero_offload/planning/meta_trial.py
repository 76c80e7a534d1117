"""Finds out whether a block saves anything for backward after its stacked experts, by a trial on the meta device.

Owns that trial. Its consequences are in [Note: parts inside of a checkpoint] of zero_core.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ..core import Stack, unit_modules


def followed_stacks(model: nn.Module, stacks: Iterable[Stack], classes: Sequence[type[nn.Module]] | None) -> set[str]:
    """Paths of the stacks after which their block saves something, so that a recomputation has to run past them.

    Runs a forward of two tokens on a copy of the model on the meta device. Returns all paths if it cannot run.
    """
    paths = {stack.path for stack in stacks}
    if not paths:
        return set()
    try:
        return _tried(_on_meta(model), paths, classes)
    except Exception:  # the model's own code may raise anything without values: then plan for the most
        return paths


def _on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device."""
    memo: dict[int, Any] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for parameter in model.parameters():
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy.deepcopy(model, memo)


class _Asked(TorchDispatchMode):
    """Answers 1 when a model asks for a meta tensor's value, for example whether a mask leaves anything out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


def _tried(model: nn.Module, paths: set[str], classes: Sequence[type[nn.Module]] | None) -> set[str]:
    found: set[str] = set()
    ran: list[str] = []  # stacks of the block that runs

    def passing(path: str) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            ran.append(path)
            return hidden_states.clone()

        return forward

    def pack(tensor: Tensor) -> Tensor:
        found.update(ran)
        return tensor

    for path in paths:
        model.get_submodule(path).forward = passing(path)
    blocks = [module for module in unit_modules(model, classes).values() if module is not model]
    for module in blocks:
        module.register_forward_hook(lambda *_: ran.clear())
    model.train()
    saved = saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]), saved, _Asked():
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=False)
    return found

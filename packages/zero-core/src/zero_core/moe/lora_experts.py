"""Applies PEFT's LoRA on stacked parameters (`target_parameters`) to one group of experts at a time. Knows no units.

PEFT wraps the stack in a module for each parameter. It computes W + scaling * B @ A for all experts before the stack
runs, and autograd keeps the sum until backward. Here each group's sum is computed when the group runs, from its part of
A and B. It is not kept, because such a group runs in a checkpoint of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def wrappers_of(model: nn.Module, path: str) -> tuple[nn.Module, ...]:
    """Returns PEFT's modules around the one at `path`, the innermost first."""
    found: list[nn.Module] = []
    while path.endswith("base_layer"):
        path = path.rpartition(".")[0]
        wrapper = model.get_submodule(path)
        if not hasattr(wrapper, "parameter_name"):
            break
        found.append(wrapper)
    return tuple(found)


Factors = tuple[Tensor, Tensor, float]  # (n, rows, r), (n, r, columns) and the scale of their product
Added = dict[str, list[Factors]]  # by the name of the parameter


def tensors_of(added: Added) -> list[Tensor]:
    return [factor for each in added.values() for left, right, _ in each for factor in (left, right)]


def like(added: Added, tensors: Iterable[Tensor]) -> Added:
    """Returns `added` with other tensors, in the order of `tensors_of`."""
    left = iter(tensors)
    return {name: [(next(left), next(left), scale) for *_, scale in each] for name, each in added.items()}


class Adapters:
    """The wrappers around one stack of experts."""

    def __init__(self, wrappers: Sequence[nn.Module], experts: int) -> None:
        self.wrappers: tuple[Any, ...] = tuple(wrappers)
        self.experts = experts

    def known(self, names: Sequence[str]) -> bool:
        """Whether each adds a product of two matrices for each expert to one of the parameters `names`."""
        of_each = all(w.parameter_name in names and getattr(w, "num_experts", 1) == self.experts for w in self.wrappers)
        return of_each and all(map(_adds_products, self.wrappers))

    def replace(self) -> None:
        """Makes the wrappers call their base layer without the adapters, which `of_groups` returns."""
        for wrapper in self.wrappers:
            wrapper.forward = partial(_call_wrapped, wrapper)

    def restore(self) -> None:
        for wrapper in self.wrappers:
            wrapper.__dict__.pop("forward", None)

    def of_groups(self, sizes: Sequence[int]) -> list[Added]:
        """Returns for each group of `sizes` experts: parameter name -> the factors of its active adapters."""
        found: list[Added] = [{} for _ in sizes]
        for wrapper in self.wrappers:
            if wrapper.disable_adapters or wrapper.merged:
                continue
            for adapter in wrapper.active_adapters:
                if adapter in wrapper.lora_A:
                    left, right = (t.split(list(sizes)) for t in self._factors(wrapper, adapter))
                    for at, group in enumerate(found):
                        one = (left[at], right[at], wrapper.scaling[adapter])
                        group.setdefault(wrapper.parameter_name, []).append(one)
        return found

    def _factors(self, wrapper: Any, adapter: str) -> tuple[Tensor, Tensor]:
        """Returns the adapter's two factors for the parameter: (experts, rows, r) and (experts, r, columns)."""
        down, up = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        down = down.view(self.experts, -1, down.shape[-1])  # (experts, r, in)
        up = up.view(up.shape[0], -1, self.experts).permute(2, 0, 1)  # (experts, out, r)
        return (up, down) if wrapper._did_swap_in_out_features else (down.mT, up.mT)


def _adds_products(wrapper: Any) -> bool:
    named = ("lora_A", "lora_B", "scaling", "active_adapters", "disable_adapters", "merged", "base_layer")
    return all(hasattr(wrapper, name) for name in (*named, "_did_swap_in_out_features"))


def _call_wrapped(wrapper: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    wrapper._check_forward_args(x, *args, **kwargs)
    if wrapper.disable_adapters and wrapper.merged:
        wrapper.unmerge()
    return wrapper.base_layer(x, *args, **kwargs)


_FACTORS = "_zero_factors"  # of the next call


def can_be_adapted(group: nn.Module) -> None:
    """Makes `group` add the factors given by `next_call` to its parameters."""
    group.forward = partial(_forward, group)


def next_call(group: nn.Module, factors: Added) -> None:
    """Sets the adapters' factors for the group's next call."""
    group.__dict__[_FACTORS] = factors


def _forward(group: nn.Module, *args: Any) -> Tensor:
    factors = group.__dict__.pop(_FACTORS, {})
    try:  # an attribute in __dict__ hides the parameter of that name
        group.__dict__.update({name: _sum(group._parameters[name], added) for name, added in factors.items()})
        return type(group).forward(group, *args)
    finally:
        for name in factors:
            group.__dict__.pop(name, None)


def _sum(total: Any, added: Sequence[Factors]) -> Tensor:
    """W + sum of scale * left @ right: (n, rows, columns), of W's dtype."""
    with torch.autocast(total.device.type, enabled=False):
        for left, right, scale in added:
            total = torch.baddbmm(total, left.to(total.dtype), right.to(total.dtype), alpha=scale)
    return total

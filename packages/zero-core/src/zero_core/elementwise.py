"""The user's optimizer over segments of parameters: what it keeps of each, and whether it may be cut at all.

Owns the probe and the copies of the optimizer. Runs no step of the training.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UnsupportedOptimizerError

__all__ = ["KeptStates", "kept_states", "over_segments"]

# They look at a parameter's shape, or at all parameters together: a slice of one is not enough for them.
_NOT_ELEMENTWISE = ("LBFGS", "SparseAdam", "Adafactor", "Muon", "Shampoo", "SOAP")
_WAY_OUT = "it needs whole parameters, a rank has slices. Use AdamW, Adam, SGD, Lion ..."


@dataclass(frozen=True)
class KeptStates:
    """Names of what an optimizer keeps of a parameter: `tensors` of its shape, `scalars` besides the step count."""

    tensors: tuple[str, ...]
    scalars: tuple[str, ...]


def kept_states(optimizer: torch.optim.Optimizer, device: torch.device) -> KeptStates:
    """What the optimizer keeps, found by steps of throw-away parameters in the options of each of its groups.

    Raises UnsupportedOptimizerError where stepping two elements together differs from stepping each alone, and where a
    state is neither of the parameter's shape nor a number.
    """
    kind = type(optimizer).__name__
    if kind in _NOT_ELEMENTWISE:
        raise UnsupportedOptimizerError(f"{kind} is not elementwise: {_WAY_OUT}")
    tensors: dict[str, None] = {}
    scalars: dict[str, None] = {}
    for group in range(len(optimizer.param_groups)):
        together, state = _probe(optimizer, group, (0, 1), device)
        for name, value in state.items():
            if name == "step" or value is None:
                continue
            if isinstance(value, Tensor) and value.shape == together.shape:
                tensors[name] = None
            elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0):
                scalars[name] = None
            else:
                what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise UnsupportedOptimizerError(
                    f"{kind} keeps {name!r} ({what}) of a parameter of shape (2,), neither a value an element nor a "
                    f"number: {_WAY_OUT}"
                )
        if device.type == "meta":
            continue
        alone = torch.cat([_probe(optimizer, group, (k,), device)[0] for k in (0, 1)])
        if not torch.allclose(together, alone, rtol=1e-4, atol=1e-6, equal_nan=True):
            raise UnsupportedOptimizerError(
                f"{kind} is not elementwise: two elements stepped together became {together.tolist()}, each alone "
                f"{alone.tolist()}; {_WAY_OUT}"
            )
    return KeptStates(tuple(tensors), tuple(scalars))


def _probe(
    optimizer: torch.optim.Optimizer, group: int, elements: tuple[int, ...], device: torch.device
) -> tuple[Tensor, dict[str, Any]]:
    """(n,) values of a throw-away parameter after two steps, and its state."""
    values, gradients = (
        torch.tensor([row[k] for k in elements], device=device) for row in ((0.5, -0.25), (0.01, -3.0))
    )
    probe = nn.Parameter(values)
    trial = over_segments(optimizer, [probe], [group])
    for _ in range(2):
        probe.grad = gradients.clone()
        trial.step()
    return probe.detach(), trial.state[probe]


def over_segments(optimizer: torch.optim.Optimizer, views: Sequence[nn.Parameter], groups: Sequence[int | None]) -> Any:
    """An optimizer of the user's class over `views`, in its groups; every group keeps its index as "zero_group"."""
    members: dict[int, list[nn.Parameter]] = defaultdict(list)
    for view, group in zip(views, groups, strict=True):
        if group is not None:
            members[group].append(view)
    made = [
        {**{k: v for k, v in optimizer.param_groups[g].items() if k != "params"}, "params": params, "zero_group": g}
        for g, params in sorted(members.items())
    ]
    if not made:
        return _NoOptimizer()
    accepted = inspect.signature(type(optimizer).__init__).parameters
    defaults = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    try:
        return type(optimizer)(made, **defaults)
    except TypeError:  # a class of the user's, built from other arguments: the same object, over other parameters
        clone = copy.copy(optimizer)
        clone.state = defaultdict(dict)
        clone.param_groups = made
        clone._optimizer_step_pre_hooks, clone._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        return clone


class _NoOptimizer:
    """What a unit without optimized parameters has."""

    def __init__(self) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        pass

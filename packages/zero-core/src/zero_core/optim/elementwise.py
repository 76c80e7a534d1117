"""The user's optimizer over segments of parameters: what it keeps of each, and whether it may be cut at all.

Owns the probe and the copies of the optimizer. Runs no step of the training.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import UnsupportedOptimizerError

__all__ = ["KeptStates", "StateFormat", "kept_states", "over_segments", "state_formats"]

# They look at a parameter's shape, or at all parameters together: a slice of one is not enough for them.
_NOT_ELEMENTWISE = ("LBFGS", "SparseAdam", "Adafactor", "Muon", "Shampoo", "SOAP")
_WAY_OUT = "it needs whole parameters, and a rank has slices of them. Use AdamW, Adam, SGD, Lion ..."
# An optimizer may treat vectors, matrices and kernels differently, and matrices by their size (Adafactor, from 128 on).
_PROBE_SHAPES = ((7,), (5, 3), (160, 130), (2, 3, 4), (2, 3, 2, 2))


@dataclass(frozen=True)
class KeptStates:
    """What an optimizer keeps of a parameter: names of `tensors` of its shape and of `scalars` besides the step count,
    and whether it `counts` steps."""

    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    counts: bool


def kept_states(optimizer: torch.optim.Optimizer, device: torch.device) -> KeptStates:
    """What the optimizer keeps, found by steps of throw-away parameters in the options of each of its groups.

    Parameters of one to four dimensions are stepped whole, flattened, and flattened in two slices. Raises
    UnsupportedOptimizerError where these differ, where a state is neither of the parameter's shape nor a number, where
    the optimizer keeps something outside its `state`, and where a step of it raises. Draws no random number.
    """
    kind = type(optimizer).__name__
    if kind in _NOT_ELEMENTWISE:
        raise UnsupportedOptimizerError(f"{kind} is not elementwise: {_WAY_OUT}")
    _refuse_tensors_of_its_own(optimizer)
    tensors: dict[str, None] = {}
    scalars: dict[str, None] = {}
    counts = False
    if device.type == "meta":
        device = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        for group in range(len(optimizer.param_groups)):
            for shape in _PROBE_SHAPES:
                state = _probe(optimizer, group, shape, device)
                counts |= "step" in state
                for name, value in state.items():
                    if name == "step" or value is None:
                        continue
                    if isinstance(value, Tensor) and value.shape == shape:
                        tensors[name] = None
                    elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0):
                        scalars[name] = None
                    else:
                        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                        raise UnsupportedOptimizerError(
                            f"{kind} keeps {name!r} ({what}) of a parameter of shape {shape}, neither a value an "
                            f"element nor a number: {_WAY_OUT}"
                        )
            _probe_neighbours(optimizer, group, device)
    return KeptStates(tuple(tensors), tuple(scalars), counts)


@dataclass(frozen=True)
class StateFormat:
    """The state that torch has of a parameter of a group, name -> value: when the optimizer is `built` (Adagrad has one
    then), and once the parameter has `stepped`. Types, dtypes and first values are read from it."""

    built: dict[str, Any]
    stepped: dict[str, Any]


def state_formats(optimizer: torch.optim.Optimizer, device: torch.device) -> list[StateFormat]:
    """Of each group, from throw-away parameters. Draws no random number."""
    capturable = any(group.get("capturable") for group in optimizer.param_groups)  # which CPU parameters cannot be
    values, gradients = _drawn(2, device if capturable else torch.device("cpu"))
    formats = []
    with torch.random.fork_rng(devices=[]):
        for group in range(len(optimizer.param_groups)):
            probe = nn.Parameter(values.clone())
            built = dict(over_segments(optimizer, [probe], [group]).state.get(probe, {}))
            formats.append(StateFormat(built, _two_steps(optimizer, group, [values], [gradients])[1]))
    return formats


def _probe(
    optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    """The state of a throw-away parameter of `shape` after two steps; raises where its slices step otherwise."""
    numel = math.prod(shape)
    values, gradients = _drawn(numel, device)
    (whole,), state = _two_steps(optimizer, group, [values.view(shape)], [gradients.view(shape)])
    for cuts in ((0, numel), (0, numel // 3, numel)):
        slices = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        steps = [_two_steps(optimizer, group, [values[part]], [gradients[part]])[0] for part in slices]
        parts = torch.cat([step for (step,) in steps])
        if not torch.allclose(whole.reshape(-1), parts, rtol=1e-4, atol=1e-6, equal_nan=True):
            at = int((whole.reshape(-1) - parts).abs().argmax())
            one, other = float(whole.reshape(-1)[at]), float(parts[at])
            how = "flattened" if len(slices) == 1 else f"flattened and cut after {cuts[1]} elements"
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} is not elementwise: of a parameter of shape {shape}, element {at} became "
                f"{one:.6g} in two steps, and {other:.6g} with the parameter {how}; {_WAY_OUT}"
            )
    return state


def _drawn(numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values and gradients (numel,) of many sizes and both signs; no random numbers."""
    row = torch.arange(numel, dtype=torch.float32, device=device)
    return (row * 0.37).sin(), (row * 1.7 + 0.3).sin() * (row * 0.11).cos().exp()


def _probe_neighbours(optimizer: torch.optim.Optimizer, group: int, device: torch.device) -> None:
    """Raises where a parameter steps otherwise behind, before or beside another one of its group."""
    (values, gradients), (others, theirs) = _drawn(6, device), _drawn(15, device)
    (alone,), _ = _two_steps(optimizer, group, [values], [gradients])
    for neighbour in (theirs.view(5, 3), None):
        for first in (True, False):
            order = slice(None) if first else slice(None, None, -1)
            both = [values, others.view(5, 3)][order], [gradients, neighbour][order]
            beside = _two_steps(optimizer, group, *both)[0][0 if first else 1]
            if not torch.allclose(alone, beside, rtol=1e-4, atol=1e-6, equal_nan=True):
                what = "with a gradient" if neighbour is not None else "without a gradient"
                raise UnsupportedOptimizerError(
                    f"{type(optimizer).__name__} steps a parameter otherwise {'before' if first else 'after'} another "
                    f"one {what} in its group, and units are stepped apart: {_WAY_OUT}"
                )


def _two_steps(
    optimizer: torch.optim.Optimizer, group: int, values: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Values of throw-away parameters of one group after two steps, and the state of the first."""
    probes = [nn.Parameter(value.clone()) for value in values]
    trial = over_segments(optimizer, probes, [group] * len(probes))
    before = _numbers(trial)
    for _ in range(2):
        for probe, gradient in zip(probes, gradients, strict=True):
            probe.grad = None if gradient is None else gradient.clone()
        try:
            trial.step()
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"a step of {type(optimizer).__name__} over a new parameter of shape {tuple(values[0].shape)} raised "
                f"{type(error).__name__}: {error}. Slices of parameters are stepped by a copy of the optimizer, so "
                "what it needs must be in its param_groups and its state, and step() must work without a closure"
            ) from error
    after = _numbers(trial)
    changed = [key for key in after if key not in before or not _same(before[key], after[key])]
    if changed:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} changes {', '.join(changed)} in step(), which no checkpoint and no other unit "
            "would see: keep it in self.state[parameter], or use AdamW, Adam, SGD, Lion ..."
        )
    return [probe.detach() for probe in probes], trial.state[probes[0]]


def _numbers(trial: Any) -> dict[str, Any]:
    """What a step must leave as it is: numbers in the group's options, and in attributes that the class has made."""
    (group,) = trial.param_groups
    found = {f"param_groups[...][{key!r}]": value for key, value in group.items() if key != "params"}
    found |= {f"self.{key}": value for key, value in _own_attributes(trial).items()}
    leaves = {key: [leaf for leaf in tree_leaves(value) if _is_number(leaf)] for key, value in found.items()}
    kept = {key: [n.clone() if isinstance(n, Tensor) else n for n in each] for key, each in leaves.items() if each}
    return kept | {f"self.state[{key!r}]": [True] for key in trial.state if not isinstance(key, Tensor)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex, Tensor))


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, as far as they let themselves be compared."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    try:
        return bool(one is other or one == other)
    except Exception:
        return False


# What a scheduler puts on an optimizer, and what torch's fused ones note for themselves.
_OTHERS = {"step", "_step_count", "_opt_called", "_need_device_dtype_check_for_fused"}
_BASE_ATTRIBUTES = frozenset(vars(torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.1))) | _OTHERS


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What the optimizer's class has put on it besides what every torch.optim.Optimizer has."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _BASE_ATTRIBUTES and not key.startswith("_zero")  # as what shard() notes does
    }


def _leaves(value: Any) -> Iterator[Any]:
    """What is in nested containers, sets and keys included."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _refuse_tensors_of_its_own(optimizer: torch.optim.Optimizer) -> None:
    """Tensors in attributes belong to whole parameters, and nothing would shard or save them; nor would it find a
    parameter by its identity."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, value in _own_attributes(optimizer).items():
        if any(leaf in known if type(leaf) is int else id(leaf) in known for leaf in _leaves(value)):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} looks parameters up in self.{key}, and slices of them are other objects: "
                "make them a group of their own, with an option in param_groups"
            )
        if any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(value)):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} keeps tensors in self.{key}, which are not sharded: keep them in "
                "self.state[parameter], or use AdamW, Adam, SGD, Lion ..."
            )


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
        return SimpleNamespace(param_groups=[], state={}, step=lambda: None)
    accepted = inspect.signature(type(optimizer).__init__).parameters
    defaults = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    try:
        again = type(optimizer)(made, **defaults)
    except TypeError:
        again = None
    own = _own_attributes(optimizer)
    if again is not None and own.keys() == _own_attributes(again).keys():
        if all(_same(value, getattr(again, key)) for key, value in own.items()):
            return again
    # A class of the user's, built from other arguments: the same object, over other parameters.
    clone = object.__new__(type(optimizer))  # copy.copy would take what Optimizer.__getstate__ names, and no more
    clone.__dict__.update(vars(optimizer))
    clone.state = defaultdict(dict)
    clone.param_groups = made
    clone._optimizer_step_pre_hooks, clone._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    clone.__dict__.pop("step", None)  # what a scheduler has put around the user's
    return clone

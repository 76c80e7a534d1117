"""An optimizer's states by name, from its contract and two dry steps of throw-away parameters.

Owns these steps, and refuses states that no shard can keep. Compares no values: the contract says whether parameters
may be stepped apart, see `contracts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import UnsupportedOptimizerError
from .by_itself import state_of
from .contracts import ELEMENTWISE, WHOLE, contract_of, is_muon
from .joint import placed
from .segments import options_of, over_segments, own_attributes, same
from .uncut import check_count, check_named, named_shapes, needs_uncut, unlike_memory

__all__ = ["KeptStates", "drawn", "dry_steps", "kept_states", "refuse_one_name", "trial_shape"]

_WAY_OUT = (
    "an elementwise optimizer keeps tensors of the parameter's shape and numbers in self.state[parameter]. Where its "
    'step looks at one parameter at a time, say shard(optimizer_contract="by itself")'
)
# An optimizer may keep other states of vectors, matrices and kernels, and of matrices by their size.
_SMALL = ((7,), (5, 3), (160, 128), (2, 3, 4), (2, 3, 2, 2))


@dataclass(frozen=True)
class KeptStates:
    """What an optimizer keeps of a parameter: names of `tensors` of its shape and of `scalars` besides the step count;
    the numbers of the groups in which it `counts` steps; names of states of other shapes, which it names; and what it
    keeps of a parameter that it needs whole in another form than contiguous fp32."""

    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    counts: frozenset[int]
    shaped: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()


def kept_states(optimizer: torch.optim.Optimizer, device: torch.device) -> KeptStates:
    """The optimizer's states, found by two dry steps in the options of each of its groups.

    An elementwise one steps a vector, one that needs parameters whole steps small ones of several shapes, and any other
    one the shapes of its own parameters. Of a joint optimizer, all that its members keep. Draws no random number.

    Raises UnsupportedOptimizerError where a state is neither of the parameter's shape nor a number and the optimizer
    does not name it, where the optimizer keeps something outside its `state`, and where a step of it raises.
    """
    found = [(_kept_states(member, device), first) for member, first in placed(optimizer)]
    refuse_one_name((n for each, _ in found for n in each.tensors), (n for each, _ in found for n in each.shaped))
    return KeptStates(
        tuple(dict.fromkeys(name for each, _ in found for name in each.tensors)),
        tuple(dict.fromkeys(name for each, _ in found for name in each.scalars)),
        frozenset(first + group for each, first in found for group in each.counts),
        tuple(dict.fromkeys(name for each, _ in found for name in each.shaped)),
        tuple(dict.fromkeys(what for each, _ in found for what in each.unlike)),
    )


def refuse_one_name(tensors: Iterable[str], shaped: Iterable[str]) -> None:
    """Raise where a state has the parameter's shape by one optimizer and another shape by the one beside it."""
    both = sorted(set(tensors) & set(shaped))
    if both:
        raise UnsupportedOptimizerError(
            f"{both[0]!r} is a state of the parameter's shape of one optimizer, and of another shape of the one beside "
            "it, so a checkpoint could not tell them apart: call it otherwise in one of them"
        )


def _kept_states(optimizer: torch.optim.Optimizer, device: torch.device) -> KeptStates:
    """As `kept_states`, of one that is no joint optimizer."""
    _refuse_lookups(optimizer)
    if contract_of(optimizer) in WHOLE:
        return _states_by_itself(optimizer)
    _refuse_tensors_of_its_own(optimizer)
    tensors: dict[str, None] = {}
    scalars: dict[str, None] = {}
    unlike: dict[str, None] = {}
    counts = False
    if device.type == "meta":
        device = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        for group in _unlike(optimizer.param_groups):
            for shape in _shapes(optimizer, group):
                state = dry_steps(optimizer, group, shape, device)
                counts |= "step" in state
                if needs_uncut(optimizer, group, shape):
                    check_count(optimizer, state, 2)
                    if (named := named_shapes(optimizer, group, shape)) is not None:
                        check_named(optimizer, shape, named, state)
                        continue
                    unlike |= dict.fromkeys(unlike_memory((n, v) for n, v in state.items() if n != "step"))
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
                            f"{type(optimizer).__name__} keeps {name!r} ({what}) of a parameter of shape {shape}, and "
                            f"{_WAY_OUT}. Where it needs whole parameters and says so by needs_uncut(), let it name "
                            "the shapes of its states by state_shapes(): see zero_core.optim.uncut"
                        )
    like, shaped = _named(optimizer)
    counting = frozenset(range(len(optimizer.param_groups)) if counts else ())
    return KeptStates((*tensors, *like), tuple(scalars), counting, shaped, tuple(unlike))


def _states_by_itself(optimizer: torch.optim.Optimizer) -> KeptStates:
    """The states of its own parameters, from one dry step of each shape."""
    like, shaped = _named(optimizer, ())
    groups = enumerate(optimizer.param_groups)
    states = {g: [state_of(optimizer, g, tuple(p.shape)) for p in group["params"]] for g, group in groups}
    for state in (each for found in states.values() for each in found):
        if not getattr(state.get("step"), "is_meta", False):
            check_count(optimizer, state, 2)
    return KeptStates(like, (), frozenset(g for g, found in states.items() if any("step" in s for s in found)), shaped)


def _named(
    optimizer: torch.optim.Optimizer, small: Sequence[tuple[int, ...]] = _SMALL
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the states that the optimizer names of its parameters, and of small ones: those that always have the
    parameter's shape, and the others."""
    found: dict[str, bool] = {}
    for group, options in enumerate(optimizer.param_groups):
        for shape in {**dict.fromkeys(small), **dict.fromkeys(tuple(p.shape) for p in options["params"])}:
            for name, named in (named_shapes(optimizer, group, shape) or {}).items():
                found[name] = found.get(name, True) and named == shape
    return tuple(n for n, like in found.items() if like), tuple(n for n, like in found.items() if not like)


def _shapes(optimizer: torch.optim.Optimizer, group: int) -> Sequence[tuple[int, ...]]:
    """Of the throw-away parameters of this group."""
    if is_muon(optimizer):
        return ((5, 3),)
    if contract_of(optimizer) == ELEMENTWISE:
        return _SMALL[:1]
    mine = _shapes_in(optimizer, group)
    whole = [shape for shape in mine if needs_uncut(optimizer, group, shape)]
    uncut: list[tuple[int, ...]] = [shape for shape in _SMALL if needs_uncut(optimizer, group, shape)]
    if whole and not uncut:  # it needs none so small
        uncut = [min(whole, key=math.prod)]
    return uncut if whole and len(whole) == len(mine) else (*_SMALL, *(s for s in uncut if s not in _SMALL))


def _shapes_in(optimizer: torch.optim.Optimizer, group: int) -> list[tuple[int, ...]]:
    """Of the parameters in this group; of a group without any, one matrix."""
    return [tuple(p.shape) for p in optimizer.param_groups[group]["params"]] or [(5, 3)]


def trial_shape(optimizer: torch.optim.Optimizer, group: int, numel: int) -> tuple[int, ...]:
    """Of a throw-away parameter of this group: a matrix, if the group has one that the optimizer needs uncut."""
    uncut = any(needs_uncut(optimizer, group, shape) for shape in _shapes_in(optimizer, group))
    return (numel // 2, 2) if uncut else (numel,)


def _unlike(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """Of the groups with the same options but for the rate, the first."""
    rates = ("params", "lr", "initial_lr")
    alike = {repr([(k, v) for k, v in g.items() if k not in rates]): i for i, g in reversed(list(enumerate(groups)))}
    return sorted(alike.values())


def drawn(numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values and gradients (numel,) of many sizes and both signs; no random numbers."""
    row = torch.arange(numel, dtype=torch.float32, device=device)
    return (row * 0.37).sin(), (row * 1.7 + 0.3).sin() * (row * 0.11).cos().exp()


def dry_steps(
    optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...], device: torch.device
) -> dict[str, Any]:
    """The state of a throw-away parameter of `shape` in this group after two steps."""
    values, gradients = (each.view(shape) for each in drawn(math.prod(shape), device))
    probe = nn.Parameter(values.clone())
    trial = over_segments(optimizer, [probe], [group])
    before = _numbers(trial)
    for _ in range(2):
        probe.grad = gradients.clone()
        try:
            trial.step()
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"a step of {type(optimizer).__name__} over a new parameter of shape {shape} raised "
                f"{type(error).__name__}: {error}. Slices of parameters are stepped by a copy of the optimizer, so "
                "what it needs must be in its param_groups and its state, and step() must work without a closure"
            ) from error
    after = _numbers(trial)
    changed = [key for key in after if key not in before or not same(before[key], after[key])]
    if changed:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} changes {', '.join(changed)} in step(), which no checkpoint and no other unit "
            f"would see: {_WAY_OUT}"
        )
    state: dict[str, Any] = trial.state[probe]
    return state


def _numbers(trial: Any) -> dict[str, Any]:
    """Numbers that a step must not change: in the groups' options, and in attributes that the class has made."""
    found: dict[str, Any] = {}
    for group in trial.param_groups:
        for key, value in options_of(group).items():
            found.setdefault(f"param_groups[...][{key!r}]", []).append(value)
    found |= {f"self.{key}": value for key, value in own_attributes(trial).items()}
    leaves = {key: [leaf for leaf in tree_leaves(value) if _is_number(leaf)] for key, value in found.items()}
    kept = {key: [n.clone() if isinstance(n, Tensor) else n for n in each] for key, each in leaves.items() if each}
    return kept | {f"self.state[{key!r}]": [True] for key in trial.state if not isinstance(key, Tensor)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex, Tensor))


def _leaves(value: Any) -> Iterator[Any]:
    """What is in nested containers, sets and keys included."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _refuse_lookups(optimizer: torch.optim.Optimizer) -> None:
    """A step runs over other objects than the model's parameters, so their identities lead nowhere."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, value in own_attributes(optimizer).items():
        if any(leaf in known if type(leaf) is int else id(leaf) in known for leaf in _leaves(value)):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} looks parameters up in self.{key}, and it steps over other objects in "
                "shards: make them a group of their own, with an option in param_groups, or use another optimizer"
            )


def _refuse_tensors_of_its_own(optimizer: torch.optim.Optimizer) -> None:
    """Tensors in attributes belong to whole parameters, and nothing would shard or save them."""
    for key, value in own_attributes(optimizer).items():
        if any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(value)):
            raise UnsupportedOptimizerError(
                f"{type(optimizer).__name__} keeps tensors in self.{key}, which are not sharded: {_WAY_OUT}"
            )

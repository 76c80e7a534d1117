"""Finds an optimizer's states by name, from its contract and dry steps, and checks the options that decide them.

Owns these steps of throw-away parameters, refuses states that no shard can keep, and options that change during a run
where other states would follow. Compares no values: the contract says whether parameters may be stepped apart, see
`contracts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_structure

from ..errors import UnsupportedOptimizerError
from .contracts import WHOLE, contract_of, options_of, over_segments, own_attributes, same, steps_whole
from .joint import kind_of, members_of, placed
from .single_parameter import state_of, step_twice
from .uncut import NeedsUncut, check_count, named_shapes, shapes_of

_WAY_OUT = (
    'With optimizer_contract="elementwise", self.state[p] may have only numbers, and tensors of the shape of p. '
    'If step() handles each parameter separately, pass optimizer_contract="by itself" to zero_core.shard'
)
_FIXED = "so it cannot change now. Set it back. To train with another value, set it before zero_core.shard"
RESET = 'To reset states, call optimizer.load_state_dict({**optimizer.full_state_dict(), "state": {}}) on every rank'
_ASSIGNED = {  # by what may be assigned in vain, how to do the same
    "param_groups": 'To change an option, write into a dict of it, as optimizer.param_groups[0]["lr"] = 0.1',
    "state": RESET,
}
_SMALL = 7  # elements of a throw-away parameter
_FREE = {"params", "lr", "weight_decay", "foreach", "fused", "adjust_lr_fn"}  # no optimizer has other states by them
_FREE |= {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}  # notes of torch's schedulers


@dataclass(frozen=True)
class KeptStates:
    """An optimizer's states of a parameter: names of `tensors` of its shape, and of `scalars` besides the step count;
    the numbers of the groups in which it `counts` steps; and names of `shaped` states, which have other shapes."""

    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    counts: frozenset[int]
    shaped: tuple[str, ...] = ()


def kept_states(optimizer: Optimizer, device: torch.device) -> KeptStates:
    """The optimizer's states, found by two dry steps in the options of each of its groups.

    An elementwise one steps a vector, and one that needs parameters whole a parameter of each of their shapes, on the
    meta device. Of a joint optimizer, all that its members keep. Draws no random number.

    Raises UnsupportedOptimizerError where an elementwise optimizer keeps a state that is neither of the parameter's
    shape nor a number, where one keeps something outside its `state`, and where a step raises.
    """
    found = [(_kept_states(member, device), first) for member, first in placed(optimizer)]
    tensors, scalars, shaped = (
        tuple(dict.fromkeys(name for each, _ in found for name in getattr(each, kind)))
        for kind in ("tensors", "scalars", "shaped")
    )
    refuse_one_name(tensors, shaped)
    return KeptStates(tensors, scalars, frozenset(first + g for each, first in found for g in each.counts), shaped)


def refuse_one_name(tensors: Iterable[str], shaped: Iterable[str]) -> None:
    """Raise where a state has the parameter's shape by one optimizer and another shape by the one beside it."""
    if both := sorted(set(tensors) & set(shaped)):
        raise UnsupportedOptimizerError(
            f"two optimizers of this model keep a state {both[0]!r}, one in the parameter's shape and one in another "
            "shape. A checkpoint could not tell the two apart: rename the state in one of the optimizers"
        )


def _kept_states(optimizer: Optimizer, device: torch.device) -> KeptStates:
    """As `kept_states`, of one that is no joint optimizer."""
    _refuse_lookups(optimizer)
    if contract_of(optimizer) not in WHOLE:
        _refuse_tensors_of_its_own(optimizer)
    like: dict[str, bool] = {}  # whether a state always has the shape of its parameter
    scalars: dict[str, None] = {}
    counts = set()
    for group in range(len(optimizer.param_groups)):
        whole, cut = shapes_of(optimizer, group)
        for shape in whole:
            state = state_of(optimizer, group, shape)
            if not getattr(state.get("step"), "is_meta", False):
                check_count(optimizer, state, 2)
            counts |= {group} if "step" in state else set()
            for name, found in (named_shapes(optimizer, group, shape) or {}).items():
                like[name] = like.get(name, True) and found == shape
        if cut:
            state = dry_steps(optimizer, group, (_SMALL,), torch.device("cpu") if device.type == "meta" else device)
            counts |= {group} if "step" in state else set()
            tensors, numbers = _elementwise_states(optimizer, state)
            like |= dict.fromkeys(tensors, True)
            scalars |= dict.fromkeys(numbers)
    tensors, shaped = ([name for name, each in like.items() if each is wanted] for wanted in (True, False))
    return KeptStates(tuple(tensors), tuple(scalars), frozenset(counts), tuple(shaped))


def _elementwise_states(optimizer: Optimizer, state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Names of the tensors and of the numbers that an elementwise optimizer keeps of a vector of `_SMALL` elements."""
    tensors, numbers = [], []
    for name, value in state.items():
        if name == "step" or value is None:
            continue
        if isinstance(value, Tensor) and value.shape == (_SMALL,):
            tensors.append(name)
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0):
            numbers.append(name)
        else:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UnsupportedOptimizerError(
                f"optimizer {kind_of(optimizer)} keeps {name!r} ({what}) for a trial of {_SMALL} elements. {_WAY_OUT}"
            )
    return tensors, numbers


def dry_steps(optimizer: Optimizer, group: int, shape: tuple[int, ...], device: torch.device) -> dict[str, Any]:
    """The state of a throw-away parameter of `shape` in this group after two steps. Draws no random number."""
    probe = nn.Parameter(torch.full(shape, 0.5, device=device).float())
    trial = over_segments(optimizer, [probe], [group])
    before = _numbers(trial)
    step_twice(trial, probe, torch.full_like(probe, 0.25))
    after = _numbers(trial)
    if changed := [key for key in after if key not in before or not same(before[key], after[key])]:
        way = "Keep it in self.state[p]" if any(key.startswith("self.state[") for key in changed) else _WAY_OUT
        raise UnsupportedOptimizerError(
            f"optimizer {kind_of(optimizer)} changes {', '.join(changed)} in step(). No checkpoint saves such a "
            f"change, and the optimizer's copies that step other shards lack it. {way}"
        )
    return trial.state[probe]


def _numbers(trial: Any) -> dict[str, Any]:
    """Numbers that a step must not change: in the groups' options, and in attributes that the class has made."""
    found: dict[str, Any] = {}
    for group in trial.param_groups:
        for key, value in options_of(group).items():
            found.setdefault(f"param_groups[...][{key!r}]", []).append(value)
    found |= {f"self.{key}": value for key, value in own_attributes(trial).items()}
    kinds = (int, float, complex, Tensor)
    leaves = {key: [leaf for leaf in tree_leaves(value) if isinstance(leaf, kinds)] for key, value in found.items()}
    kept = {key: [n.clone() if isinstance(n, Tensor) else n for n in each] for key, each in leaves.items() if each}
    return kept | {f"self.state[{key!r}]": [True] for key in trial.state if not isinstance(key, Tensor)}


def _leaves(value: Any) -> Iterator[Any]:
    """The leaves of nested containers, sets and keys included."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _refuse_lookups(optimizer: Optimizer) -> None:
    """A step runs over other objects than the model's parameters, so their identities lead nowhere."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key, value in own_attributes(optimizer).items():
        if any(leaf in known if type(leaf) is int else id(leaf) in known for leaf in _leaves(value)):
            raise UnsupportedOptimizerError(
                f"optimizer {kind_of(optimizer)} keeps parameters in self.{key}, but after zero_core.shard step() gets "
                "other tensors, the shards. In a class of your own, mark parameters by an option of their group, as "
                '{"params": [p], "slow": True}, which step() reads in self.param_groups. Or use another optimizer'
            )


def _refuse_tensors_of_its_own(optimizer: Optimizer) -> None:
    """Tensors in attributes belong to whole parameters, and nothing would shard or save them."""
    for key, value in own_attributes(optimizer).items():
        if any(isinstance(leaf, Tensor) and leaf.numel() > 1 for leaf in tree_leaves(value)):
            raise UnsupportedOptimizerError(
                f"optimizer {kind_of(optimizer)} keeps tensors in self.{key}, where nothing shards or saves them: "
                f"keep tensors of each parameter's shape in self.state[parameter] instead"
            )


# -- options that change during a run ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateFormat:
    """The state that torch has of a parameter of a group, name -> value: when the optimizer is `built` (Adagrad has one
    then), and once the parameter has `stepped`. Types, dtypes and first values are read from it. `named`: of a shape,
    as `uncut.named_shapes`."""

    built: dict[str, Any]
    stepped: dict[str, Any]
    named: Callable[[tuple[int, ...]], dict[str, tuple[int, ...]] | None]


class Options:
    """The live options of the user's groups. `formats`: the format of each group's states with its current options."""

    def __init__(self, optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        self._optimizer, self._groups = optimizer, groups  # those of the sharded optimizer: the same dicts
        self.formats = state_formats(optimizer, device)
        # By the numbers of groups, except of those that a class steps whole: it does the rest.
        self._first = {
            number: (options_of(group), _switches(group))
            for number, group in enumerate(optimizer.param_groups)
            if group["params"] and not steps_whole(optimizer, number)
        }
        self._parameters = self._members()
        self._asks = any(isinstance(each, NeedsUncut) for each in members_of(optimizer))
        self._whole = self._needed_whole()

    def seal(self, state: Any) -> None:
        """Make `state` that of the given optimizer, and let `check` compare the attributes from now on."""
        for each in members_of(self._optimizer):
            each.state = state
        self._marks = self._marked()

    def check(self) -> None:
        """Call it before anything is updated. Numbers may change at each step, but not become 0 or cease to be.

        Raises UnsupportedOptimizerError naming an option that was switched, or a group that has other parameters than
        it had.
        """
        if any(mine is not given for mine, given in zip_longest(self._groups, self._optimizer.param_groups)):
            self.refuse_assigned("param_groups")
        marks = self._marked()
        for key in {**self._marks, **marks}:
            one, other = self._marks.get(key), marks.get(key)
            if one is not other and (isinstance(one, Tensor) or not same(one, other)):
                self.refuse_assigned(key[0])
        if (now := self._members()) != self._parameters:
            self._refuse_members(now)
        if others := [g for g, whole in enumerate(self._needed_whole()) if whole != self._whole[g]]:
            raise UnsupportedOptimizerError(
                f"an option of param group {others[0]} of optimizer {kind_of(self._optimizer)} changed during the "
                f"run. It decides which parameters must stay whole, or which states they have, {_FIXED}"
            )
        for number, (first, old) in self._first.items():
            group = self._optimizer.param_groups[number]
            new = _switches(group)
            if changed := [key for key in old if old[key] != new.get(key)]:  # others come with checkpoints of others
                given = [options.get(changed[0]) for options in (first, group)]
                before, after = ("a tensor" if isinstance(each, Tensor) else repr(each) for each in given)
                raise UnsupportedOptimizerError(
                    f"param group {number} changed {changed[0]} from {before} to {after} during the run. It may decide "
                    f"which states optimizer {kind_of(self._optimizer)} has, {_FIXED}"
                )

    def _marked(self) -> dict[tuple[str, int, int], Any]:
        """The leaves and the structure of each attribute of each member that its class may read in step()."""
        return {
            (name, member, number): leaf
            for member, each in enumerate(members_of(self._optimizer))
            for name, value in {**own_attributes(each), "state": each.state, "defaults": each.defaults}.items()
            for number, leaf in enumerate([*tree_leaves(value), tree_structure(value)])
        }

    def refuse_assigned(self, name: str) -> NoReturn:
        """Raise, as an attribute of the given optimizer, or of the sharded one, got another value."""
        way = _ASSIGNED.get(name) or (
            f"Set {name} before zero_core.shard. To change {name} during the run, replace self.{name} in your class by "
            "an option of a parameter group, which step() reads from self.param_groups"
        )
        raise UnsupportedOptimizerError(
            f"{name} of optimizer {kind_of(self._optimizer)} was assigned after zero_core.shard. The "
            f"shards are stepped by copies of the optimizer, with the earlier {name}: remove the assignment. {way}"
        )

    def _members(self) -> list[frozenset[int]]:
        """Of each group, the ids of its parameters."""
        return [frozenset(map(id, group["params"])) for group in self._optimizer.param_groups]

    def _refuse_members(self, now: list[frozenset[int]]) -> None:
        """Raise, as groups have other parameters: shards update each in the group that it had when they were made."""
        none: frozenset[int] = frozenset()
        pairs = enumerate(zip_longest(self._parameters, now, fillvalue=none))
        number, old, new = next(((n, *pair) for n, pair in pairs if pair[0] != pair[1]), (len(now) - 1, none, none))
        raise UnsupportedOptimizerError(
            f"the parameters of param group {number} of optimizer {kind_of(self._optimizer)} changed after "
            f"zero_core.shard (added: {len(new - old)}, removed: {len(old - new)}), but only the earlier parameters "
            "have shards: put them back. To train another parameter p, add p before zero_core.shard. To stop training "
            "p, call p.requires_grad_(False). To change its options later, give p its own group before zero_core.shard"
        )

    def _needed_whole(self) -> list[dict[tuple[int, ...], dict[str, tuple[int, ...]] | None]]:
        """For each group, maps the shape of a parameter that the optimizer needs whole to the shapes of its states."""
        groups = range(len(self._optimizer.param_groups) if self._asks else 0)
        return [{s: named_shapes(self._optimizer, g, s) for s in shapes_of(self._optimizer, g)[0]} for g in groups]


def state_formats(optimizer: Optimizer, device: torch.device) -> list[StateFormat]:
    """Of each group, from throw-away parameters. Draws no random number."""
    capturable = any(group.get("capturable") for group in optimizer.param_groups)  # its parameters are on a device
    where, formats = device if capturable else torch.device("cpu"), []
    for group in range(len(optimizer.param_groups)):
        whole, cut = shapes_of(optimizer, group)
        built: dict[str, Any] = {}
        if whole or cut:
            shape = (1, 2) if whole else (2,)  # a matrix, where it needs these
            probe = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=where))
            built = dict(over_segments(optimizer, [probe], [group]).state.get(probe, {}))
        stepped = {name: value for shape in whole for name, value in state_of(optimizer, group, shape).items()}
        stepped |= dry_steps(optimizer, group, (2,), where) if cut else {}
        formats.append(StateFormat(built, stepped, partial(named_shapes, optimizer, group)))
    return formats


def _switches(group: Mapping[str, Any]) -> dict[str, Any]:
    """Options that may decide which states there are, or which code runs."""
    return {key: _switch(value) for key, value in group.items() if key not in _FREE}


def _switch(value: Any) -> Any:
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, (int, float)):
        return value != 0
    if isinstance(value, Sequence):
        return tuple(map(_switch, value))
    # To look into a tensor may wait for the device.
    return type(value) if isinstance(value, Tensor) or type(value).__hash__ is None else value

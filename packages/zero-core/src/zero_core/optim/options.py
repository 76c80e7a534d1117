"""What options the user's groups have at a step, and whether training may go on with those that have changed.

Owns the probe of a change. What the store keeps and computes after it is the store's to check: `SwitchesOptions`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedOptimizerError
from ..store import ShardStore, SwitchesOptions
from .by_itself import state_of
from .contracts import steps_whole
from .elementwise import drawn, dry_steps, trial_shape
from .joint import kind_of, members_of
from .segments import options_of, over_segments
from .uncut import NeedsUncut, named_shapes, needs_uncut

__all__ = ["Options", "StateFormat", "state_formats"]


@dataclass(frozen=True)
class StateFormat:
    """The state that torch has of a parameter of a group, name -> value: when the optimizer is `built` (Adagrad has one
    then), and once the parameter has `stepped`. Types, dtypes and first values are read from it. `named`: of a shape,
    as `uncut.named_shapes`."""

    built: dict[str, Any]
    stepped: dict[str, Any]
    named: Callable[[tuple[int, ...]], dict[str, tuple[int, ...]] | None]


class Options:
    """The options of the user's groups, which are live. `formats`: of each group, as the optimizer has them now."""

    def __init__(self, optimizer: torch.optim.Optimizer, store: ShardStore, device: torch.device) -> None:
        self._optimizer, self._store, self._device = optimizer, store, device
        self.formats = state_formats(optimizer, device)
        # Of each group, options with which it has been, in their order: the last ones are those of the last check.
        self._history = [[options_of(group)] for group in optimizer.param_groups]
        self._switches = _all_switches(optimizer)
        self._probed: set[Any] = set()
        self._parameters = self._members()
        self._asks = any(isinstance(each, NeedsUncut) for each in members_of(optimizer))
        self._whole = self._needed_whole()

    def check(self) -> None:
        """Call it before anything is updated. It compares options only, until one is switched on, off or otherwise.

        Raises UnsupportedOptimizerError naming an option with which training cannot go on as the optimizer would, or a
        group that has other parameters than it had.
        """
        self._check_members()
        if self._needed_whole() != self._whole:
            raise UnsupportedOptimizerError(
                f"an option that decides which states and whole parameters {kind_of(self._optimizer)} needs was "
                "changed during the run, and stores have those of the start. Set it back; what shall hold from the "
                "first step on belongs into the optimizer before zero_core.shard"
            )
        now = _all_switches(self._optimizer)
        if now == self._switches:
            return
        changed = [n for n, (old, new) in enumerate(zip(self._switches, now, strict=True)) if old != new]
        for n in changed:
            if (self._switches[n], now[n]) not in self._probed:
                self._probe(n)
                self._probed.add((self._switches[n], now[n]))
        for n in changed:
            others = [each for each in self._history[n] if _switches(each) != now[n]]
            self._history[n] = [*others, options_of(self._optimizer.param_groups[n])]
        self.formats = [  # a state that is not in use any more is kept
            StateFormat(new.built, {**old.stepped, **new.stepped}, new.named)
            for old, new in zip(self.formats, state_formats(self._optimizer, self._device), strict=True)
        ]
        self._switches = now

    def _members(self) -> list[frozenset[int]]:
        """Of each group, the ids of its parameters."""
        return [frozenset(map(id, group["params"])) for group in self._optimizer.param_groups]

    def _check_members(self) -> None:
        """Raise where groups have other parameters: shards update each in the group that it had when they were made."""
        now = self._members()
        if now == self._parameters:
            return
        none: frozenset[int] = frozenset()
        pairs = enumerate(zip_longest(self._parameters, now, fillvalue=none))
        number, old, new = next(((n, *pair) for n, pair in pairs if pair[0] != pair[1]), (len(now) - 1, none, none))
        raise UnsupportedOptimizerError(
            f"since zero_core.shard, {len(new - old)} parameters came into param group {number} of "
            f"{kind_of(self._optimizer)} and {len(old - new)} left it, and shards are updated in the groups of then. "
            "Put them back. A parameter that shall have other options later gets a group of its own before shard; to "
            "stop training one, call requires_grad_(False) on it"
        )

    def _needed_whole(self) -> dict[tuple[int, tuple[int, ...]], dict[str, tuple[int, ...]] | None]:
        """By group and shape of what the optimizer says that it needs whole, the shapes of states, if it names them."""
        if not self._asks:
            return {}
        groups = enumerate(self._optimizer.param_groups)
        keys = dict.fromkeys((number, tuple(p.shape)) for number, group in groups for p in group["params"])
        return {key: named_shapes(self._optimizer, *key) for key in keys if needs_uncut(self._optimizer, *key)}

    def _probe(self, number: int) -> None:
        before = self._history[number]
        what = _changes(before[-1], options_of(self._optimizer.param_groups[number]), number)
        try:
            _step_after_changes(self._optimizer, number, before, self._device)
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"{what}, and {type(self._optimizer).__name__} cannot go on so after a step: "
                f"{type(error).__name__}: {error}. Set it back; what shall hold from the first step on belongs into "
                "the optimizer before zero_core.shard"
            ) from error
        if isinstance(self._store, SwitchesOptions):
            self._store.switch_options(number, before, what)


def state_formats(optimizer: torch.optim.Optimizer, device: torch.device) -> list[StateFormat]:
    """Of each group, from throw-away parameters. Draws no random number."""
    capturable = any(group.get("capturable") for group in optimizer.param_groups)  # which CPU parameters cannot be
    where = device if capturable else torch.device("cpu")
    formats = []
    with torch.random.fork_rng(devices=[]):
        for group in range(len(optimizer.param_groups)):
            if steps_whole(optimizer, group):
                formats.append(_format_by_itself(optimizer, group))
                continue
            shape = trial_shape(optimizer, group, 2)
            probe = nn.Parameter(torch.zeros(shape, device=where))
            built = dict(over_segments(optimizer, [probe], [group]).state.get(probe, {}))
            stepped = dry_steps(optimizer, group, shape, where)
            formats.append(StateFormat(built, stepped, partial(named_shapes, optimizer, group)))
    return formats


def _format_by_itself(optimizer: torch.optim.Optimizer, group: int) -> StateFormat:
    """Of the states that the group's own parameters have; of tensors their numbers of elements mean nothing."""
    shapes = dict.fromkeys(tuple(p.shape) for p in optimizer.param_groups[group]["params"])
    stepped = {k: v for shape in shapes for k, v in state_of(optimizer, group, shape).items()}
    probe = nn.Parameter(torch.zeros(trial_shape(optimizer, group, 2)))
    built = dict(over_segments(optimizer, [probe], [group]).state.get(probe, {}))
    return StateFormat(built, stepped, partial(named_shapes, optimizer, group))


def _step_after_changes(
    optimizer: torch.optim.Optimizer, group: int, before: Sequence[Mapping[str, Any]], device: torch.device
) -> None:
    """Step a throw-away parameter with each of the options `before`, and then with the group's own.

    Raises what the optimizer does. Draws no random number.
    """
    shape = trial_shape(optimizer, group, 6)
    values, gradients = (v.view(shape) for v in drawn(6, torch.device("cpu") if device.type == "meta" else device))
    probe = nn.Parameter(values.clone())
    trial = over_segments(optimizer, [probe], [group])
    after = dict(trial.param_groups[0])
    with torch.random.fork_rng(devices=[]):
        for options in (*before, after):
            trial.param_groups[0].update(options)
            probe.grad = gradients.clone()
            trial.step()


def _all_switches(optimizer: torch.optim.Optimizer) -> list[tuple[tuple[str, Any], ...]]:
    """Of each group; none of one whose parameters the optimizer's own class steps, by themselves: it does the rest."""
    groups = enumerate(optimizer.param_groups)
    return [() if steps_whole(optimizer, number) else _switches(group) for number, group in groups]


def _switches(group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What may change which states there are, or which code runs. The rate is none: it may be 0 at any step."""
    return tuple((key, _switch(value)) for key, value in group.items() if key not in ("params", "lr"))


def _switch(value: Any) -> Any:
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, (int, float)):
        return value != 0
    if isinstance(value, Sequence):
        return tuple(map(_switch, value))
    # To look into a tensor may wait for the device.
    return type(value) if isinstance(value, Tensor) or type(value).__hash__ is None else value


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], number: int) -> str:
    changed = [k for k, v in after.items() if k in before and k != "lr" and _switch(before[k]) != _switch(v)]
    changed = changed or [k for k in after if k not in before]  # else a scheduler's notes, such as initial_lr
    told = (f"{k} from {_shown(before.get(k))} to {_shown(after[k])}" for k in changed)
    return f"param group {number} changed {', '.join(told)} during the run"


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)

"""What options the user's groups have at a step, and whether training may go on with those that have changed.

Owns the check of a change: whether stores have memory for the states that it brings, and begin them as torch does.
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
from .by_itself import state_of
from .contracts import steps_whole
from .elementwise import drawn, dry_steps, trial_shape
from .joint import kind_of, members_of
from .segments import options_of, over_segments
from .uncut import NeedsUncut, named_shapes, shapes_of

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

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer, self._device = optimizer, device
        self.formats = state_formats(optimizer, device)
        self._last = [options_of(group) for group in optimizer.param_groups]
        # Of each group, the options with which it has stepped, in the order in which it last had them.
        self._stepped: list[list[dict[str, Any]]] = [[] for _ in self._last]
        self._switches = _all_switches(optimizer)
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
        changed = [n for n, (old, new) in enumerate(zip(self._switches, now, strict=True)) if old != new]
        for n in changed:
            self._check_change(n)
        if changed:
            self.formats = [  # a state that is not in use any more is kept
                StateFormat(new.built, {**old.stepped, **new.stepped}, new.named)
                for old, new in zip(self.formats, state_formats(self._optimizer, self._device), strict=True)
            ]
            self._switches = now
        for n, group in enumerate(self._optimizer.param_groups):
            if n in changed or not self._stepped[n]:
                others = [each for each in self._stepped[n] if _switches(each) != now[n]]
                self._last[n] = options_of(group)
                self._stepped[n] = [*others, self._last[n]]

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

    def _needed_whole(self) -> list[dict[tuple[int, ...], dict[str, tuple[int, ...]] | None]]:
        """By group and shape of what the optimizer says that it needs whole, the shapes of states."""
        groups = range(len(self._optimizer.param_groups) if self._asks else 0)
        return [{s: named_shapes(self._optimizer, g, s) for s in shapes_of(self._optimizer, g)[0]} for g in groups]

    def _check_change(self, number: int) -> None:
        """Raise where the optimizer cannot go on with a group's new options, or begins a state as no store does."""
        kind, stepped = kind_of(self._optimizer), self._stepped[number]
        after = options_of(self._optimizer.param_groups[number])
        what = _changes(self._last[number], after, number)
        try:
            old, _ = self._run(number, stepped)
            new, values = self._run(number, [*stepped, after])
            begun = [name for name in new if name not in old]
            alike = not stepped or torch.equal(values, self._run(number, [*stepped, after], zeros=begun)[1])
        except Exception as error:
            raise UnsupportedOptimizerError(
                f"{what}, and {kind} cannot go on so after a step: {type(error).__name__}: {error}. Set it back; what "
                "shall hold from the first step on belongs into the optimizer before zero_core.shard"
            ) from error
        if unknown := ", ".join(name for name in begun if name not in self.formats[number].stepped):
            raise UnsupportedOptimizerError(
                f"{what}: {kind} then keeps {unknown}, for which the store has no memory. Give the optimizer "
                "the new value before zero_core.shard; after that you can set the old one until the new one shall apply"
            )
        if not alike:
            raise UnsupportedOptimizerError(
                f"{what}: {kind} does not begin {', '.join(begun)} with zeros, as stores do. Set it back; to train "
                "with the new value, give it to the optimizer before zero_core.shard"
            )

    def _run(
        self, group: int, options: Sequence[Mapping[str, Any]], zeros: Sequence[str] = ()
    ) -> tuple[list[str], Tensor]:
        """The states of a throw-away parameter after a step with each of these options, and its values.

        zeros: states that it has before the last step. Raises what the optimizer does, and draws no random number.
        """
        shape = trial_shape(self._optimizer, group, 6)
        values, gradients = (each.view(shape) for each in drawn(6, _where(self._optimizer, self._device)))
        probe = nn.Parameter(values.clone())
        trial = over_segments(self._optimizer, [probe], [group])
        with torch.random.fork_rng(devices=[]):
            for each in options:
                if each is options[-1]:
                    trial.state[probe].update({name: torch.zeros_like(values) for name in zeros})
                trial.param_groups[0].update(each)
                probe.grad = gradients.clone()
                trial.step()
        return [name for name, value in trial.state[probe].items() if value is not None], probe.detach()


def state_formats(optimizer: torch.optim.Optimizer, device: torch.device) -> list[StateFormat]:
    """Of each group, from throw-away parameters. Draws no random number."""
    where, formats = _where(optimizer, device), []
    for group in range(len(optimizer.param_groups)):
        whole, cut = shapes_of(optimizer, group)
        built: dict[str, Any] = {}
        if whole or cut:
            probe = nn.Parameter(torch.zeros(trial_shape(optimizer, group, 2), device=where))
            built = dict(over_segments(optimizer, [probe], [group]).state.get(probe, {}))
        stepped = {name: value for shape in whole for name, value in state_of(optimizer, group, shape).items()}
        stepped |= dry_steps(optimizer, group, (2,), where) if cut else {}
        formats.append(StateFormat(built, stepped, partial(named_shapes, optimizer, group)))
    return formats


def _where(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.device:
    """Where throw-away parameters are: on the CPU, which those of an optimizer that is capturable cannot be."""
    return device if any(group.get("capturable") for group in optimizer.param_groups) else torch.device("cpu")


def _all_switches(optimizer: torch.optim.Optimizer) -> list[tuple[tuple[str, Any], ...]]:
    """Of each group; none of one without parameters, nor of one whose class steps them whole: it does the rest."""
    groups = enumerate(optimizer.param_groups)
    return [() if not g["params"] or steps_whole(optimizer, number) else _switches(g) for number, g in groups]


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

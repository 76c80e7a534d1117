"""Checks the options of the user's groups: they may change during a run as far as states stay those of its start.

Owns the check of a change.
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
from .elementwise import dry_steps, trial_shape
from .joint import kind_of, members_of
from .segments import options_of, over_segments
from .uncut import NeedsUncut, named_shapes, shapes_of

__all__ = ["Options", "StateFormat", "state_formats"]

_FREE = {"params", "lr", "weight_decay", "foreach", "fused", "adjust_lr_fn"}  # no optimizer has other states by them
_FREE |= {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}  # notes of torch's schedulers


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

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self.formats = state_formats(optimizer, device)
        self._first = [options_of(group) for group in optimizer.param_groups]
        self._switches = _all_switches(optimizer)
        self._parameters = self._members()
        self._asks = any(isinstance(each, NeedsUncut) for each in members_of(optimizer))
        self._whole = self._needed_whole()

    def check(self) -> None:
        """Call it before anything is updated. Numbers may change at each step, but not become 0 or cease to be.

        Raises UnsupportedOptimizerError naming an option that was switched, or a group that has other parameters than
        it had.
        """
        if (now := self._members()) != self._parameters:
            self._refuse_members(now)
        if self._needed_whole() != self._whole:
            raise UnsupportedOptimizerError(
                f"an option that decides which states and whole parameters {kind_of(self._optimizer)} needs was "
                "changed during the run, and stores have those of the start. Set it back; what shall hold from the "
                "first step on belongs into the optimizer before zero_core.shard"
            )
        for number, (old, new) in enumerate(zip(self._switches, _all_switches(self._optimizer), strict=True)):
            if changed := [key for key in old if old[key] != new.get(key)]:  # others come with checkpoints of others
                values = self._first[number], self._optimizer.param_groups[number]
                given = [options.get(changed[0]) for options in values]
                before, after = ("a tensor" if isinstance(each, Tensor) else repr(each) for each in given)
                raise UnsupportedOptimizerError(
                    f"param group {number} changed {changed[0]} from {before} to {after} during the run, and by it "
                    f"{kind_of(self._optimizer)} may need other states than it had at zero_core.shard. Set it back; "
                    "give another value to the optimizer before zero_core.shard"
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
            f"since zero_core.shard, {len(new - old)} parameters came into param group {number} of "
            f"{kind_of(self._optimizer)} and {len(old - new)} left it, and shards are updated in the groups of then. "
            "Put them back. A parameter that shall have other options later gets a group of its own before shard; to "
            "stop training one, call requires_grad_(False) on it"
        )

    def _needed_whole(self) -> list[dict[tuple[int, ...], dict[str, tuple[int, ...]] | None]]:
        """For each group, maps the shape of a parameter that the optimizer needs whole to the shapes of its states."""
        groups = range(len(self._optimizer.param_groups) if self._asks else 0)
        return [{s: named_shapes(self._optimizer, g, s) for s in shapes_of(self._optimizer, g)[0]} for g in groups]


def state_formats(optimizer: torch.optim.Optimizer, device: torch.device) -> list[StateFormat]:
    """Of each group, from throw-away parameters. Draws no random number."""
    capturable = any(group.get("capturable") for group in optimizer.param_groups)  # its parameters are on a device
    where, formats = device if capturable else torch.device("cpu"), []
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


def _all_switches(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Of each group; none of one without parameters, nor of one whose class steps them whole: it does the rest."""
    groups = enumerate(optimizer.param_groups)
    return [{} if not g["params"] or steps_whole(optimizer, number) else _switches(g) for number, g in groups]


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

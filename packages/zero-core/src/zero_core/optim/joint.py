"""Joins several optimizers of one model into a `JointOptimizer`, such as Muon for matrices and AdamW for the rest.

Its groups, options and states are those of its members.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class JointOptimizer(torch.optim.Optimizer):
    """Steps each of `optimizers` in turn. Its groups are the same dicts as theirs, one optimizer after another.

    `zero_core.shard(model, [muon, adamw])` makes one. Make it yourself where one optimizer has to be given, as to a
    Trainer of transformers. It works on a plain model too, with the same bits as its members.

    Examples:
        >>> import torch, zero_core
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        >>> matrices = [p for p in model.parameters() if p.ndim == 2]
        >>> others = [p for p in model.parameters() if p.ndim != 2]
        >>> both = zero_core.JointOptimizer(torch.optim.SGD(matrices, lr=0.1), torch.optim.AdamW(others, lr=1e-3))
        >>> [group["lr"] for group in both.param_groups]
        [0.1, 0.001]
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        """Raises ValueError where two of them have the same parameter, or there are none."""
        if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
            given = ", ".join(type(each).__name__ for each in optimizers) or "nothing"
            raise ValueError(f"JointOptimizer({given}): give it torch.optim.Optimizers, each over its own parameters")
        self.optimizers = tuple(part for each in optimizers for part in members_of(each))
        counted = Counter(id(p) for group in self.param_groups for p in group["params"])
        if twice := [p for group in self.param_groups for p in group["params"] if counted[id(p)] > 1]:
            raise ValueError(
                f"two of the optimizers have the same {len(twice) // 2} parameters (the first of shape "
                f"{tuple(twice[0].shape)}): give each parameter to one of them"
            )
        super().__init__([group for each in self.optimizers for group in each.param_groups], {})
        self._zero_joined = True

    # The base class keeps these two as attributes. Here they are read from the members, which may replace theirs.

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The members' groups, one member after another: the same dicts."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]
        """The members' states by parameter: a new dict of their dicts."""
        return defaultdict(dict, {p: state for each in self.optimizers for p, state in each.state.items()})

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("param_groups", "state"):
            super().__setattr__(name, value)
        elif hasattr(self, "_zero_joined"):  # the base class assigns both before
            raise ValueError(f"a JointOptimizer has no {name} of its own: assign {name} of one of its `optimizers`")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError: a group belongs to a member."""
        if not any(param_group is group for each in self.optimizers for group in each.param_groups):
            raise ValueError("a JointOptimizer takes no groups itself: call add_param_group of one of its `optimizers`")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for each in self.optimizers:
            each.step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Loads a state dict of `state_dict`, or a sequence of the members' own, in their order."""
        given = joined_states(state_dict)
        groups = iter(given["param_groups"])
        for each in self.optimizers:
            mine = [next(groups) for _ in each.param_groups]
            numbers = {number for group in mine for number in group["params"]}
            states = {number: state for number, state in given["state"].items() if number in numbers}
            each.load_state_dict({"state": states, "param_groups": mine})


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the members of a joint optimizer; any other is its own only member."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)


def member_of(optimizer: torch.optim.Optimizer, group: int) -> tuple[torch.optim.Optimizer, int]:
    """Returns the member that has this group, and the group's number in it."""
    return next((each, group - first) for each, first in placed(optimizer) if group - first < len(each.param_groups))


def placed(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.optim.Optimizer, int]]:
    """Yields each member, and the number of its first group among all."""
    first = 0
    for each in members_of(optimizer):
        yield each, first
        first += len(each.param_groups)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns its name for errors: "AdamW", or "Muon and AdamW"."""
    return " and ".join(type(each).__name__ for each in members_of(optimizer))


def joined(optimizer: Any) -> Any:
    """Joins a sequence of optimizers into one; returns anything else as it is."""
    if not isinstance(optimizer, (list, tuple)):
        return optimizer
    return optimizer[0] if len(optimizer) == 1 else JointOptimizer(*optimizer)


def joined_states(state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Joins the state dicts of a joint optimizer's members into its own; returns a single one as it is."""
    if isinstance(state_dict, Mapping):
        return state_dict
    states: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    for each in state_dict:
        first = sum(len(group["params"]) for group in groups)
        numbers = {number: first + n for n, number in enumerate(n for g in each["param_groups"] for n in g["params"])}
        states |= {numbers[number]: state for number, state in each["state"].items()}
        groups += [{**group, "params": [numbers[n] for n in group["params"]]} for group in each["param_groups"]]
    return {"state": states, "param_groups": groups}

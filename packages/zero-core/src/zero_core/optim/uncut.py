"""Which parameters an optimizer needs whole: Muon's matrices are orthogonalised, and a part of one is not enough.

Owns that question, and what `shard` refuses because of the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ..comm.ranks import Ranks
from ..errors import UnsupportedOptimizerError
from ..layout import Rows
from .by_itself import packed_shape, state_of
from .contracts import WHOLE, contract_of, is_muon
from .joint import kind_of, member_of

__all__ = [
    "NamesStates",
    "NeedsUncut",
    "StepsRows",
    "check_count",
    "check_named",
    "check_rows",
    "check_uncut",
    "named_shapes",
    "needs_uncut",
    "steps_rows",
    "uncut_groups",
    "unlike_memory",
]


@runtime_checkable
class NeedsUncut(Protocol):
    """What an optimizer that is not elementwise has, so that its parameters are not cut where it says so.

    Such a parameter is stepped alone, by the optimizer's own class, over the parameter in its shape. Its states have
    that shape too, unless the optimizer names them: see `NamesStates`.
    """

    def needs_uncut(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
        """Whether it needs all of a parameter of `shape` in `group`, one of its param_groups, at once."""


@runtime_checkable
class NamesStates(NeedsUncut, Protocol):
    """What such an optimizer has too if its states have other shapes than the parameter (SOAP), or depend on its shape.

    It is asked, because a step over a large matrix may take minutes, and a plan has none to step. `shard` compares the
    answer with what steps of small parameters leave. A state that it names is a contiguous fp32
    tensor from the first step on, of any shape: () is that of a number. "step" is the count of steps, with the first.
    """

    def state_shapes(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The shape of each state that it keeps of a parameter of `shape` in `group`, but for the count "step"."""


@runtime_checkable
class StepsRows(NeedsUncut, Protocol):
    """What such an optimizer has too if it steps each row of some parameters by itself, rows being along dimension 0,
    as `zero_core.Muon` does with each matrix of a stack. Then a mixture's experts may be cut into groups.

    All states of a row are the row's then: they have the parameter's shape, or are the count "step".
    """

    def steps_rows(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
        """Whether rows of a parameter of `shape` in `group` may be stepped apart."""


def needs_uncut(optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...]) -> bool:
    """Whether the optimizer needs all of a parameter of `shape` in this group at once."""
    member, number = member_of(optimizer, group)
    if is_muon(member) or contract_of(member) in WHOLE:
        return True
    return isinstance(member, NeedsUncut) and member.needs_uncut(member.param_groups[number], shape)


def steps_rows(optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...]) -> bool:
    """Whether of a parameter of `shape` in this group whole rows are all that the optimizer needs at once."""
    member, number = member_of(optimizer, group)
    if not isinstance(member, StepsRows) or not needs_uncut(optimizer, group, shape):
        return False
    like = all(each == shape for each in (named_shapes(optimizer, group, shape) or {}).values())
    return like and member.steps_rows(member.param_groups[number], shape)


def named_shapes(
    optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]] | None:
    """The shapes of the states of a parameter of `shape` in this group, if the optimizer names them."""
    member, number = member_of(optimizer, group)
    if contract_of(member) in WHOLE:
        states = state_of(member, number, shape).items()
        return {name: packed_shape(value) for name, value in states if name != "step" and value is not None}
    if not isinstance(member, NamesStates) or not needs_uncut(optimizer, group, shape):
        return None
    named = member.state_shapes(member.param_groups[number], shape)
    return {name: tuple(each) for name, each in named.items() if name != "step"}


def check_named(
    optimizer: torch.optim.Optimizer, shape: tuple[int, ...], named: Mapping[str, tuple[int, ...]], state: Any
) -> None:
    """Raise unless a step of a parameter of `shape` has left the states that the optimizer names."""
    left = {name: value for name, value in state.items() if name != "step" and value is not None}
    shapes = {name: tuple(getattr(value, "shape", ("a number",))) for name, value in left.items()}
    what = f"{type(optimizer).__name__}.state_shapes() says of a parameter of shape {shape}: {dict(named)}"
    if shapes != named:
        raise UnsupportedOptimizerError(
            f'{what}, and a step leaves {shapes}: let it name each state of each shape, but for the count "step", and '
            "keep numbers as tensors"
        )
    if odd := unlike_memory(left.items()):
        raise UnsupportedOptimizerError(
            f"{what}, and a step leaves {odd[0]}: stores keep states as contiguous float32, so make it that before it "
            "is put into the state"
        )


def check_count(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], steps: int) -> None:
    """Raise unless "step", where the optimizer has it, is the number of steps: stores keep it as that."""
    if "step" in state and float(state["step"]) != steps:
        raise UnsupportedOptimizerError(
            f'{type(optimizer).__name__} has {float(state["step"]):g} for the state "step" after {steps} steps, and '
            "stores give it the number of steps that were taken: let it count each step, the first one too, or call it "
            "otherwise"
        )


def unlike_memory(states: Iterable[tuple[str, Any]]) -> list[str]:
    """Those of the states that no store keeps with all their bits and strides, each with what it is."""
    return [
        f"{name} in {value.dtype}" + ("" if value.is_contiguous() else f" with strides {value.stride()}")
        for name, value in states
        if isinstance(value, Tensor) and not (value.dtype == torch.float32 and value.is_contiguous())
    ]


def uncut_groups(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The group of each parameter that the optimizer needs whole, by the ids of these parameters."""
    return {
        id(p): number
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if needs_uncut(optimizer, number, tuple(p.shape))
    }


def check_uncut(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Raise where parameters that the optimizer needs whole would have to be in parts, or to have other strides."""
    uncut = uncut_groups(optimizer)
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in uncut}
    names = list(found)
    if odd := [name for name, p in found.items() if not p.is_contiguous()]:
        first = found[odd[0]]
        raise UnsupportedOptimizerError(
            f"{odd[0]} of {kind_of(optimizer)}, of shape {tuple(first.shape)}, has the strides {first.stride()}, and "
            "shards are contiguous: products of such matrices are rounded otherwise. Make the parameter contiguous "
            "before zero_core.shard, with p.data = p.data.contiguous()"
        )
    if names and not ranks.cuts_unequally:
        raise UnsupportedOptimizerError(
            f"{len(names)} parameters of {kind_of(optimizer)} are needed whole ({names[0]} ...), so the shards of "
            f"{ranks.shard.size} ranks have different sizes, and the collectives that were given move equal ones "
            "alone: give them the methods of zero_core.comm.RowCollectives, or use stage=0, where every rank has all "
            "states; or an elementwise optimizer, such as AdamW"
        )


def check_rows(optimizer: torch.optim.Optimizer, found: Iterable[tuple[Rows, int]]) -> None:
    """Raise UnsupportedOptimizerError where the optimizer does not say that it steps these rows apart from each other.

    found: rows that are in a unit without the others, of parameters that the optimizer needs whole, and the number of
    the parameter's group.
    """
    for rows, group in found:
        if not steps_rows(optimizer, group, rows.shape):
            raise UnsupportedOptimizerError(
                f"{rows.name} of {kind_of(optimizer)} is needed whole, and its experts are cut into groups: give "
                "shard(expert_bytes=None), which leaves them in their block's unit"
            )

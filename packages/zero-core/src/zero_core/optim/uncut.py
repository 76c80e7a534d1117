"""Decides which parameters an optimizer needs whole. Muon orthogonalises matrices, so a part of one is not enough.

Owns that question, and the refusals of `shard` that follow from the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.optim import Optimizer

from ..comm.ranks import Ranks
from ..errors import UnsupportedOptimizerError
from ..layout import Rows
from .contracts import TOGETHER, WHOLE, contract_of, is_muon
from .joint import kind_of, member_of
from .single_parameter import packed_shape, state_of


@runtime_checkable
class NeedsUncut(Protocol):
    """An optimizer that is not elementwise and says which parameters it needs whole. These are not cut.

    Such a parameter is stepped alone, by the optimizer's own class, over the parameter in its shape. Its states may
    have any shape, and dry steps find them: see `single_parameter.state_of`.
    """

    def needs_uncut(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
        """Whether it needs all of a parameter of `shape` in `group`, one of its param_groups, at once."""


@runtime_checkable
class StepsRows(NeedsUncut, Protocol):
    """Such an optimizer that steps each row of some parameters by itself, along dimension 0, as `zero_core.Muon` does
    with each matrix of a stack. Then a mixture's experts may be cut into groups.

    Each row has states of its own then: they have the parameter's shape, or are the count "step".
    """

    def steps_rows(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
        """Whether rows of a parameter of `shape` in `group` may be stepped separately."""


def needs_uncut(optimizer: Optimizer, group: int, shape: tuple[int, ...]) -> bool:
    """Whether the optimizer needs all of a parameter of `shape` in this group at once."""
    member, number = member_of(optimizer, group)
    if is_muon(member) or contract_of(member) in WHOLE:
        return True
    return isinstance(member, NeedsUncut) and member.needs_uncut(member.param_groups[number], shape)


def shapes_of(optimizer: Optimizer, group: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Returns the shapes of this group's parameters: of those that the optimizer needs whole, and of the others."""
    shapes = dict.fromkeys(tuple(p.shape) for p in optimizer.param_groups[group]["params"])
    whole = [shape for shape in shapes if needs_uncut(optimizer, group, shape)]
    return whole, [shape for shape in shapes if shape not in whole]


def steps_rows(optimizer: Optimizer, group: int, shape: tuple[int, ...]) -> bool:
    """Whether the optimizer needs a parameter of `shape` in this group only row by row, each row whole."""
    member, number = member_of(optimizer, group)
    if contract_of(member) == TOGETHER or not isinstance(member, StepsRows) or not needs_uncut(optimizer, group, shape):
        return False
    like = all(each == shape for each in (named_shapes(optimizer, group, shape) or {}).values())
    return like and member.steps_rows(member.param_groups[number], shape)


def named_shapes(optimizer: Optimizer, group: int, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
    """Returns the packed shapes of the states of a parameter of `shape` in this group; None if it may be cut."""
    if not needs_uncut(optimizer, group, shape):
        return None
    states = state_of(optimizer, group, shape).items()
    return {name: packed_shape(value) for name, value in states if name != "step" and value is not None}


def check_count(optimizer: Optimizer, state: Mapping[str, Any], steps: int) -> None:
    """Raises unless "step", where the optimizer has it, is the number of steps: stores keep only that number."""
    if "step" in state and float(state["step"]) != steps:
        raise UnsupportedOptimizerError(
            f'{type(optimizer).__name__} has {float(state["step"]):g} for the state "step" after {steps} steps, and a '
            'store keeps the number of steps as "step": let it count each step, the first one too, or rename the state'
        )


def uncut_groups(optimizer: Optimizer) -> dict[int, int]:
    """Returns the group of each parameter that the optimizer needs whole, by the ids of these parameters."""
    pairs = ((number, p) for number, group in enumerate(optimizer.param_groups) for p in group["params"])
    return {id(p): number for number, p in pairs if needs_uncut(optimizer, number, tuple(p.shape))}


def check_uncut(model: nn.Module, optimizer: Optimizer, ranks: Ranks) -> None:
    """Raises where parameters that the optimizer needs whole would have to be cut, or to have other strides."""
    uncut = uncut_groups(optimizer)
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in uncut}
    names = list(found)
    if odd := [name for name, p in found.items() if not p.is_contiguous()]:
        first = found[odd[0]]
        raise UnsupportedOptimizerError(
            f"{odd[0]} of shape {tuple(first.shape)} has the strides {first.stride()}. In shards it is contiguous, "
            "and its products round differently: before zero_core.shard, make it so with p.data = p.data.contiguous()"
        )
    if names and not ranks.cuts_unequally:
        raise UnsupportedOptimizerError(
            f"{len(names)} parameters of optimizer {kind_of(optimizer)} are needed whole ({names[0]} ...), so the "
            f"shards of {ranks.shard.size} ranks have different sizes, and collectives= moves shards of one size only: "
            "give them the methods of zero_core.comm.RowCollectives, or use stage=0, where every rank has all states; "
            "or an elementwise optimizer, such as AdamW"
        )


def check_rows(optimizer: Optimizer, found: Iterable[tuple[Rows, int]]) -> None:
    """Raises UnsupportedOptimizerError where the optimizer does not say that it steps these rows separately.

    found: rows that are in a unit without the others, of parameters that the optimizer needs whole, and the number of
    the parameter's group.
    """
    for rows, group in found:
        if not steps_rows(optimizer, group, rows.shape):
            raise UnsupportedOptimizerError(
                f"optimizer {kind_of(member_of(optimizer, group)[0])} must update {rows.name} as one tensor, but its "
                "experts are sharded in groups: pass expert_bytes=None to zero_core.shard, to shard all together"
            )

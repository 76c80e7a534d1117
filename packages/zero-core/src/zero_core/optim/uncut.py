"""Which parameters an optimizer needs whole: Muon's matrices are orthogonalised, and a part of one is not enough.

Owns that question, and what `shard` refuses because of the answer.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..comm.ranks import Ranks
from ..errors import UnsupportedOptimizerError
from ..layout import Rows
from .joint import kind_of, member_of

__all__ = ["NeedsUncut", "check_uncut", "is_muon", "needs_uncut", "refuse_rows", "uncut_groups"]

_MUON: Any = getattr(torch.optim, "Muon", None)  # from torch 2.9 on


@runtime_checkable
class NeedsUncut(Protocol):
    """What an optimizer that is not elementwise has, so that its parameters are not cut where it says so.

    Such a parameter is stepped alone, by the optimizer's own class, over the parameter in its shape. Its states have to
    have that shape too.
    """

    def needs_uncut(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
        """Whether it needs all of a parameter of `shape` in `group`, one of its param_groups, at once."""


def is_muon(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is torch's own."""
    return _MUON is not None and type(optimizer) is _MUON


def needs_uncut(optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...]) -> bool:
    """Whether the optimizer needs all of a parameter of `shape` in this group at once."""
    member, number = member_of(optimizer, group)
    if is_muon(member):
        return True
    return isinstance(member, NeedsUncut) and member.needs_uncut(member.param_groups[number], shape)


def uncut_groups(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The group of each parameter that the optimizer needs whole, by the ids of these parameters."""
    return {
        id(p): number
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if needs_uncut(optimizer, number, tuple(p.shape))
    }


def check_uncut(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Raise where parameters that the optimizer needs whole would have to be in parts."""
    if ranks.cuts_unequally:
        return
    uncut = uncut_groups(optimizer)
    names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) in uncut]
    if names:
        raise UnsupportedOptimizerError(
            f"{len(names)} parameters of {kind_of(optimizer)} are needed whole ({names[0]} ...), so the shards of "
            f"{ranks.shard.size} ranks have different sizes, and the collectives that were given move equal ones "
            "alone: give them the methods of zero_core.comm.RowCollectives, or use stage=0, where every rank has all "
            "states; or an elementwise optimizer, such as AdamW"
        )


def refuse_rows(optimizer: torch.optim.Optimizer, rows: Mapping[str, Rows], uncut: Container[str]) -> None:
    """Raise where a parameter that the optimizer needs whole is in rows of several units."""
    cut = [each.name for name, each in rows.items() if name in uncut]
    if cut:
        raise UnsupportedOptimizerError(
            f"{cut[0]} of {kind_of(optimizer)} is needed whole, and its experts are cut into groups: give "
            "shard(expert_bytes=None), which leaves them in their block's unit"
        )

"""First values of real parameters; stands in for init.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .layout import UnitLayout


class Initialiser:
    def __init__(self, model: nn.Module) -> None:
        pass

    def shard(self, layout: UnitLayout, parameters: Sequence[nn.Parameter], rank: int) -> Tensor:
        shard = torch.zeros(layout.shard_numel, dtype=torch.float32)
        by_name = {slot.name: p for slot, p in zip(layout.slots, parameters, strict=True)}
        for piece in layout.pieces(rank):
            values = by_name[piece.slot.name].detach().reshape(-1)[piece.slot_start : piece.slot_stop]
            shard[piece.shard_start : piece.shard_stop].copy_(values)
        return shard


def become(parameter: nn.Parameter, data: Tensor) -> None:
    parameter.data = data

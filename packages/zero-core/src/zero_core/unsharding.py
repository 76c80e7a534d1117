"""Makes a sharded model a plain one again (`unshard`). Owns the memory that this needs, and where the values go.

Not here: how values leave shards, and how the model is restored where that fails, as in a second `shard` (in
earlier.py).
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from .comm.ranks import Ranks
from .device import available_bytes
from .earlier import Earlier
from .errors import ZeroError
from .making import move_buffers
from .runtime.unit import Unit
from .sharding import forget_handle, handle

__all__ = ["unshard"]


def unshard(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Makes `model` plain: every parameter has its memory and whole value, on every rank. Collective.

    Parameters stay the same objects, with their ties, requires_grad and hooks, in the dtype in which the model
    computes, and contiguous, whatever strides they had before `shard`. `.grad` of the optimizer's parameters is None,
    even between step() and zero_grad(), where torch would still have the gradient. fp32 masters of 16-bit parameters
    and optimizer states are dropped, with the store; `shard` of a sharded model keeps the masters.
    device: where parameters and buffers are then; None: where the model computes.

    Raises ZeroError where a rank has no room for the whole model beside the shards, inside forward, backward and
    `gathered`, and where gradients wait for a step. The model is in its shards then, and has lost nothing.

    Examples:
        >>> import torch, zero_core
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> zero_core.unshard(model)
        >>> type(model.weight), model.weight.data_ptr() != 0
        (<class 'torch.nn.parameter.Parameter'>, True)
    """
    found = handle(model)
    where = torch.device(device) if device is not None else found.ranks.device
    if where.type == "meta":
        raise ZeroError("unshard() with device=meta, which has no values: name a device with memory, or leave it out")
    over = "which zero_core.unshard has made plain: step a plain optimizer, and run the forward again"
    with torch.inference_mode(False), torch.no_grad(), Earlier(model, "unshard", over) as earlier:
        _check_room(found.ranks, sum(unit.nbytes for unit in found.units), where)
        values = [_values(unit, where) for unit in found.units]
        for unit in reversed(found.units):
            for k, value in enumerate(values.pop()):
                unit.give_back(k, value)
            for composite in unit.composites:
                composite.give_back()
        for stacked in found.engine.stacks.parameters:
            stacked.unshard()
        if device is not None:
            move_buffers(model, where)
        forget_handle(earlier)


def _values(unit: Unit, device: torch.device) -> list[Tensor]:
    """Returns copies of the unit's parameters, in memory of their own."""
    unit.unshard()
    try:
        return [view.to(device, copy=True) for view in unit.views]
    finally:
        unit.reshard()


def _check_room(ranks: Ranks, nbytes: int, device: torch.device) -> None:
    """Raises ZeroError on all ranks if one has no room for `nbytes`."""
    if device.type == "cpu":  # all ranks of a machine share it
        nbytes *= int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    room = available_bytes(device)
    lacks = room is not None and room < nbytes
    if any(ranks.anywhere([lacks], "unshard()")):
        have = f"of which {room:,} are there" if lacks else "which another rank does not have"
        raise ZeroError(
            f"unshard() needs {nbytes:,} bytes on {device} for the whole model on each rank, {have}: name a device= "
            "with more room, or leave the model in its shards: another zero_core.shard trains it there, and "
            "zero_core.save_pretrained writes it"
        )

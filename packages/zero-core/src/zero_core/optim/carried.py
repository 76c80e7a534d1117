"""State that the user's optimizer already has when it is sharded goes into the store, and its memory with it.

Owns the way from `optimizer.state` to shards. Steps, moments and numbers keep their bits; rank 0's are every rank's.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.ranks import Ranks
from ..errors import UnsupportedOptimizerError, ZeroError
from ..runtime.unit import Unit
from ..store import ScalarStates, ShardStore

__all__ = ["carry_over", "put_states"]

_WAY_OUT = "give shard() an optimizer that has not stepped, or shard first and load with zero_core.checkpoint.load"


def carry_over(optimizer: torch.optim.Optimizer, units: Sequence[Unit], store: ShardStore, ranks: Ranks) -> None:
    """Move the states of parameters that have stepped into the store, and their counts to the units. Collective.

    Raises as `put_states` does.
    """
    stepped = {id(p): state for p, state in optimizer.state.items() if _steps(state) > 0}
    found = [
        (unit, k, stepped[id(parameter)])
        for unit in units
        for k, parameter in enumerate(unit.parameters)
        if id(parameter) in stepped and unit.groups[k] is not None
    ]
    put_states(found, store, ranks, type(optimizer).__name__)
    optimizer.state.clear()  # with what it made before any step, as Adagrad does: the store has its own


def put_states(found: Sequence[tuple[Unit, int, dict[str, Any]]], store: ShardStore, ranks: Ranks, kind: str) -> None:
    """Write whole states (unit, parameter in it, its state as torch has it) into the store. Collective.

    One whole tensor is alive on its way at a time. Raises UnsupportedOptimizerError naming a state that the store does
    not keep, and ZeroError where ranks hold states of different parameters or steps.
    """
    description = [(u.layout.slots[k].name, _steps(state), sorted(state)) for u, k, state in found]
    if not ranks.agree(zlib.crc32(repr(description).encode()), "the optimizer's state"):
        raise ZeroError(
            f"ranks bring optimizers of different steps ({len(found)} parameters have state here): {_WAY_OUT}"
        )
    for unit, k, state in found:
        tensors = {n: v for n, v in state.items() if isinstance(v, Tensor) and n != "step"}
        numbers = {n: float(v) for n, v in state.items() if isinstance(v, (int, float)) and n != "step"}
        for name, value in sorted(tensors.items()):
            _put(unit, k, name, value, store, ranks, kind)
        for name, number in sorted(numbers.items()):
            _put_number(unit, k, name, number, store, ranks)
        unit.steps[k] = _steps(state)


def _steps(state: Mapping[str, Any]) -> int:
    """Steps that the state stands for; SGD has a momentum and counts none."""
    if "step" in state:
        return int(state["step"])
    return int(any(value is not None for value in state.values()))


def _put(unit: Unit, k: int, name: str, value: Tensor, store: ShardStore, ranks: Ranks, kind: str) -> None:
    slot = unit.layout.slots[k]
    if value.dim() == 0 and name not in store.state_names():  # not by the shape: a parameter may have none itself
        _put_number(unit, k, name, float(value), store, ranks)
        return
    if name not in store.state_names() or value.shape != slot.shape:
        raise UnsupportedOptimizerError(
            f"{kind} brings {name!r} of {slot.name}, shape {tuple(value.shape)}, which {type(store).__name__} does not "
            f"keep (it keeps {', '.join(store.state_names())}): {_WAY_OUT}"
        )
    whole = ranks.broadcast(value.detach().to(ranks.device, torch.float32).contiguous(), unit.name).reshape(-1)
    unit.write_part(name, k, whole)


def _put_number(unit: Unit, k: int, name: str, number: float, store: ShardStore, ranks: Ranks) -> None:
    if not isinstance(store, ScalarStates) or name not in store.scalar_names():
        raise UnsupportedOptimizerError(
            f"{type(store).__name__} does not keep {name!r} of {unit.layout.slots[k].name}: {_WAY_OUT}"
        )
    number = float(ranks.broadcast(torch.tensor(number, dtype=torch.float64, device=ranks.device), unit.name))
    for segment, place in enumerate(unit.segment_slots()):
        if place == k:
            store.write_scalar(unit.index, segment, name, number)

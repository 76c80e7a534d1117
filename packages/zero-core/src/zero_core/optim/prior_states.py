"""Moves the states that the user's optimizer has before shard() into the store, and frees their memory.

Owns the way from `optimizer.state` to shards. Steps, moments and numbers keep their bits; all ranks take rank 0's.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.ranks import Ranks
from ..errors import UnsupportedOptimizerError, ZeroError
from ..store import ShardStore
from ..unit_memory.unit import Unit, optimized_in
from .joint import kind_of, members_of
from .single_parameter import packed, packed_shape
from .state_names import state_formats

_WAY_OUT = "give shard() an optimizer that has not stepped, or shard first and load with zero_core.checkpoint.load"
_OTHER = "Remove this state, or use the states of an optimizer of the same class and options"


def carry_over(optimizer: torch.optim.Optimizer, units: Sequence[Unit], store: ShardStore, ranks: Ranks) -> None:
    """Moves the states of parameters that have stepped into the store, and their counts to the units. Collective.

    Raises as `put_states` does, and UnsupportedOptimizerError naming a state that no step made and that a new optimizer
    would not begin with.
    """
    members = members_of(optimizer)
    _refuse_early(optimizer, units, ranks.device)
    stepped = {id(p): state for each in members for p, state in each.state.items() if _steps(state) > 0}
    found = [(u, k, u.rows_of(k, stepped[id(p)])) for u, k, p in optimized_in(units) if id(p) in stepped]
    put_states(found, store, ranks, f"optimizer {kind_of(optimizer)}")
    for each in members:
        each.state.clear()  # also states made before any step, as Adagrad's are: the store has its own


def _refuse_early(optimizer: torch.optim.Optimizer, units: Sequence[Unit], device: torch.device) -> None:
    """Raises where a parameter has a state before its first step: it would be taken for a step's state, or be lost."""
    states = {id(p): state for each in members_of(optimizer) for p, state in each.state.items()}
    early = [
        (unit.layout.slots[k].name, unit.groups[k], states[id(p)])
        for unit, k, p in optimized_in(units)
        if int(states.get(id(p), {"step": 1}).get("step", 0)) == 0
    ]
    formats = state_formats(optimizer, device) if early else []
    for name, group, state in early:
        form = formats[group]  # type: ignore[index]  # of a group
        kept = {n: v for n, v in state.items() if n != "step" and v is not None}
        if "step" in state:  # a new optimizer takes the place of this one, as for Adagrad
            kept = {n: v for n, v in kept.items() if not _begins_with(form.built.get(n), v)}
        elif "step" not in form.stepped:
            continue  # states are the only sign of a step
        if kept:
            carried = kept.keys() <= form.built.keys()  # a store keeps the states of copies
            raise UnsupportedOptimizerError(
                f"optimizer {kind_of(optimizer)} has {', '.join(map(repr, kept))} in the state of {name} before the "
                "first step. Shards begin with empty states: create states in step(), where state[p] is empty"
                + (". Or take one step of the plain model before zero_core.shard" if carried else "")
            )


def _begins_with(built: Any, value: Any) -> bool:
    """Whether a new copy of the optimizer, which has `built`, begins with this value. Two tensors count as equal. A
    tensor alone has to be zeros, or on meta."""
    if isinstance(value, Tensor):
        return isinstance(built, Tensor) or value.is_meta or not bool(value.any())
    return not isinstance(value, (int, float)) or value == built


def put_states(found: Sequence[tuple[Unit, int, dict[str, Any]]], store: ShardStore, ranks: Ranks, kind: str) -> None:
    """Writes whole states (unit, parameter in it, its state in torch's format) into the store. Collective.

    One whole tensor is on the device at a time. Raises as `check_states` does, and ZeroError where ranks hold states of
    different parameters or steps.
    """
    description = [(u.layout.slots[k].name, _steps(state), sorted(state)) for u, k, state in found]
    if not ranks.agree(zlib.crc32(repr(description).encode()), "the optimizer's state"):
        raise ZeroError(f"ranks bring optimizers of different steps (states here: {len(found)}): {_WAY_OUT}")
    check_states(found, store, kind)
    for unit, k, state in found:
        states: dict[str, Any] = {n: v for n, v in state.items() if isinstance(v, (Tensor, int, float)) and n != "step"}
        names = [name for name in store.state_names() if isinstance(states.get(name), Tensor)]
        for name in names:
            unit.write_part(name, k, from_rank_0(states[name], unit))
        for name in sorted(unit.shaped(k).keys() & states.keys()):
            unit.write_shaped(k, name, from_rank_0(packed(states[name]), unit))
            names.append(name)
        for name in sorted(states.keys() - set(names)):
            mine = torch.tensor(float(states[name]), dtype=torch.float64, device=ranks.device)
            number = float(ranks.broadcast(mine, unit.name))
            for segment in unit.segments_of(k):
                store.write_scalar(unit.index, segment, name, number)
        unit.steps[k] = _steps(state)


def _steps(state: Mapping[str, Any]) -> int:
    """Returns the steps that the state counts. A state without a count, as SGD's momentum, counts as 1 if it has a
    value."""
    return int(state["step"]) if "step" in state else int(any(value is not None for value in state.values()))


def check_states(found: Sequence[tuple[Unit, int, dict[str, Any]]], store: ShardStore, kind: str) -> None:
    """Raises UnsupportedOptimizerError naming a state that the store does not keep, or keeps in another shape."""
    names, scalars = store.state_names(), store.scalar_names()
    for unit, k, state in found:
        slot, shaped = unit.layout.slots[k], unit.shaped(k)
        for name, value in state.items():
            if name == "step" or not isinstance(value, (Tensor, int, float)):
                continue
            shape = packed_shape(value) if name in shaped else tuple(value.shape) if isinstance(value, Tensor) else ()
            kept = {**dict.fromkeys(scalars, ()), **dict.fromkeys(names, slot.shape), **shaped}
            if shape != kept.get(name):
                raise UnsupportedOptimizerError(
                    f"{kind} has a state {name!r} of shape {shape} for {slot.name}, and the {type(store).__name__} "
                    f"keeps only {', '.join(f'{n!r} of shape {s}' for n, s in kept.items())}. {_OTHER}"
                )


def from_rank_0(value: Tensor, unit: Unit) -> Tensor:
    """Returns (numel,) fp32 on the device: rank 0's `value`, of any shape. On other ranks it may be on meta."""
    ranks = unit.ranks
    if value.is_meta and not ranks.device.type == "meta":
        mine = torch.empty(value.shape, dtype=torch.float32, device=ranks.device)
    else:
        mine = value.detach().to(ranks.device, torch.float32).contiguous()
    return ranks.broadcast(mine, unit.name).reshape(-1)

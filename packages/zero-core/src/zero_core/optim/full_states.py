"""Gathers an optimizer's states from shards into one plain dict in torch's format, and puts them back.

Owns that format, and the comparisons before anything changes. Not here: folders of shards (in checkpoint).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..active_calls import in_backward
from ..comm.ranks import Ranks
from ..errors import UnsupportedOptimizerError, ZeroError, reached
from ..hooks.engine import Engine
from ..precision import as_bytes, rounded
from ..unit_memory.unit import Unit, optimized_in
from ..util.tensor_json import without_functions
from .prior_states import check_states, from_rank_0, put_states
from .single_parameter import is_number, number_of
from .state_names import RESET, StateFormat

INSTEAD = (
    "To save the optimizer, call zero_core.checkpoint.save(folder, model, optimizer) on every rank; checkpoint.load "
    "reads the folder at any number of ranks. For a plain dict, call optimizer.full_state_dict() on every rank"
)

_Groups = Sequence[Mapping[str, Any]]
# Number in a state dict, parameter, and its unit and place there, or those of each of its rows.
_Placed = tuple[int, Tensor, list[tuple[Unit, int]], StateFormat]


class States:
    """The `state` of a sharded optimizer, whose states are in shards. Only its truth can be asked for."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedOptimizerError(
            "optimizer.state of a sharded optimizer can neither be read nor changed, because each rank has a part of "
            f"each state. Use zero_core.full_state(parameter, name) and zero_core.set_full_state. {RESET}. {INSTEAD}"
        )

    __getattr__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = __iter__ = __len__ = __eq__ = _refuse
    __or__ = __ror__ = __ior__ = __reversed__ = __reduce_ex__ = _refuse
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        """True, because torch.distributed.checkpoint makes states by a step of zeros where there are none."""
        return True


def refuse_busy(engine: Engine, call: str) -> None:
    if engine.busy or in_backward():
        raise ZeroError(f"{call} inside forward or backward: call it after loss.backward() returned")


# -- reading -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def gather_states(
    groups: _Groups, formats: Sequence[StateFormat], engine: Engine, *, keep: bool
) -> tuple[dict[Tensor, dict[str, Any]], dict[int, Tensor]]:
    """Returns each parameter's state in torch's format, and the fp32 masters of 16-bit parameters by number.

    Collective. They are on the host. On the device there is one state of one parameter at a time. keep: False returns
    none of them on this rank.
    """
    states: dict[Tensor, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    for number, parameter, places, form in _trained(groups, formats, engine):
        unit, k = places[0]
        made = form.stepped if unit.steps[k] else form.built
        names = _kept(unit, k, form) if unit.steps[k] else [name for name in made if _stored(unit, name)]
        state = {name: _value(places, name, made.get(name)) for name in names}
        if state and form.named(unit.layout.slots[k].shape) is not None:
            state |= {name: None for name, like in made.items() if like is None}
        master = None if unit.dtype == torch.float32 else _gather(places, "master")
        if keep and state:
            states[parameter] = state
        if keep and master is not None:
            masters[number] = master
    return states, masters


def _trained(groups: _Groups, formats: Sequence[StateFormat], engine: Engine) -> Iterator[_Placed]:
    where: dict[int, list[tuple[Unit, int]]] = {}
    for unit, k, whole in optimized_in(engine.units):
        where.setdefault(id(whole), []).append((unit, k))
    for number, parameter in enumerate(p for group in groups for p in group["params"]):
        if places := where.get(id(parameter)):
            unit, k = places[0]
            yield number, parameter, places, formats[unit.groups[k]]  # type: ignore[index]


def _kept(unit: Unit, k: int, form: StateFormat) -> list[str]:
    """Returns the names of parameter k's states in torch after a step, as far as the store has them."""
    if (named := form.named(unit.layout.slots[k].shape)) is None:
        return [name for name in form.stepped if _stored(unit, name)]
    return [*(["step"] if "step" in form.stepped else []), *named]


def _stored(unit: Unit, name: str) -> bool:
    """Whether the store has state `name`. It lacks those with which an optimizer encodes others in its own dtypes."""
    return name == "step" or name in unit.store.state_names() or name in unit.store.scalar_names()


def _value(places: Sequence[tuple[Unit, int]], name: str, like: Any) -> Any:
    """Returns the state `name` of a parameter, in the type and the scalar dtype of `like`. Collective."""
    unit, k = places[0]
    if name == "step":
        number: float = unit.steps[k]
    elif name in unit.store.scalar_names() and name not in unit.shaped(k):
        number = _read_number(unit, k, name, like)
    else:
        found = _gather(places, name)
        return number_of(found, like) if name in unit.shaped(k) and is_number(like) else found
    return torch.tensor(number, dtype=like.dtype, device="cpu") if isinstance(like, Tensor) else type(like)(number)


def _read_number(unit: Unit, k: int, name: str, like: Any) -> float:
    """Returns a number from the ranks that have a part of the parameter, and so the number. Collective."""
    parts = unit.segments_of(k)
    found = unit.store.read_scalar(unit.index, parts[0], name) if parts else None
    mine = unit.ranks.numbers([0.0, 0.0] if found is None else [found, 1.0])
    total, count = unit.ranks.sum_everywhere(mine, f"{name} of {unit.layout.slots[k].name}").tolist()
    return total / count if count else float(like)


def _gather(places: Sequence[tuple[Unit, int]], name: str) -> Tensor:
    """Returns fp32 of the state's shape on the host, in memory of its own. Collective."""
    unit, k = places[0]
    if len(places) > 1:
        whole = torch.empty(unit.layout.slots[k].whole.shape, dtype=torch.float32, device="cpu")
        for unit, k in places:
            unit.rows(k, whole).copy_(unit.full_state(k, name))
        return whole
    values = unit.full_state(k, name).cpu()
    return values if values.untyped_storage().nbytes() == values.nbytes else values.clone()


# -- writing -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def put_back(
    groups: _Groups, formats: Sequence[StateFormat], engine: Engine, state_dict: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Writes a state dict of `full_state_dict` or of a torch optimizer into the shards. Collective.

    Rank 0's is written and returned; on other ranks its tensors are on meta. Raises before anything is changed:
    ValueError for other groups, UnsupportedOptimizerError for states that are absent, unknown or of another shape, and
    ZeroError for masters of other weights.
    """
    given = _from_rank_0(engine.ranks, state_dict)
    ours, theirs = ([len(g["params"]) for g in side] for side in (groups, given["param_groups"]))
    if ours != theirs:
        raise ValueError(f"groups of {theirs} parameters loaded into an optimizer with groups of {ours}")
    ids = [each for group in given["param_groups"] for each in group["params"]]  # numbers, or names in DCP's dicts
    brought: list[tuple[Unit, int, dict[str, Any]]] = []
    masters: list[tuple[Unit, int, dict[str, Any]]] = []
    cleared: list[tuple[Unit, int, StateFormat]] = []
    early: dict[str, bool] = {}
    for number, _, places, form in _trained(groups, formats, engine):
        entry = {name: value for name, value in given["state"].get(ids[number], {}).items() if value is not None}
        master = given.get("masters", {}).get(ids[number])
        for unit, k in places:
            if entry:
                _refuse_absent(unit, k, form, entry)
                early[unit.layout.slots[k].name] = _is_early(form, entry)
                brought.append((unit, k, unit.rows_of(k, entry)))
            elif unit.steps[k]:
                cleared.append((unit, k, form))
            if master is not None and unit.dtype != torch.float32:
                masters.append((unit, k, {"master": unit.rows(k, master)}))
    check_states([*brought, *masters], engine.store, "the state dict")
    _refuse_early(early, engine.ranks)
    _check_masters(masters, engine.ranks)
    for unit, k, entry in masters:
        unit.write_part("master", k, from_rank_0(entry["master"], unit))
    put_states(brought, engine.store, engine.ranks, "the state dict")
    for unit, k, form in cleared:
        _clear(unit, k, form)
    for group, saved in zip(groups, given["param_groups"], strict=True):
        options = {name: copy.deepcopy(value) for name, value in saved.items() if name != "params"}
        group.update(options)  # type: ignore[attr-defined]  # a dict of the optimizer's
    return given


def _from_rank_0(ranks: Ranks, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    if ranks.size == 1:
        return state_dict
    ranks.meet("optimizer.load_state_dict")
    sent: list[Any] = [None]
    if ranks.rank == 0:
        state_dict = {**state_dict, "param_groups": [without_functions(group) for group in state_dict["param_groups"]]}
        sent = [tree_map_only(Tensor, lambda t: t.to("meta") if t.dim() else t.cpu(), state_dict)]
    with reached(ranks.rank, ranks.size):
        dist.broadcast_object_list(sent, src=0)
    return state_dict if ranks.rank == 0 else sent[0]


def _refuse_absent(unit: Unit, k: int, form: StateFormat, entry: Mapping[str, Any]) -> None:
    """Raises where states are absent. "step" alone may be: torch's SGD counts no steps, and zero_optim_cpu's does."""
    none = [name for name, like in form.stepped.items() if like is None]
    absent = [name for name in _kept(unit, k, form) if name not in entry and name not in none]
    if absent and absent != ["step"] and ("step" not in entry or int(entry["step"]) > 0):
        raise UnsupportedOptimizerError(
            f"the state dict has {list(entry)} of {unit.layout.slots[k].name}, but not {absent}: training would go on "
            "with empty states. Load what optimizer.full_state_dict() returned, or state_dict() of a torch optimizer "
            "with the same options. Or call zero_core.checkpoint.load(folder, model, optimizer)"
        )


def _is_early(form: StateFormat, entry: Mapping[str, Any]) -> bool:
    """Whether the state has counted no step, and has values that a new one does not begin with. On meta it has none."""
    begun = {name: torch.as_tensor(value) for name, value in entry.items() if name != "step"}
    values = [(torch.as_tensor(form.built.get(name, 0.0)), value) for name, value in begun.items() if not value.is_meta]
    return int(entry.get("step", 1)) == 0 and any(bool((v != first.reshape(-1)[0].to(v)).any()) for first, v in values)


def _refuse_early(early: Mapping[str, bool], ranks: Ranks) -> None:
    anywhere = ranks.anywhere([*early.values()], "the state dict's steps")
    if names := [name for name, flag in zip(early, anywhere, strict=True) if flag]:
        raise UnsupportedOptimizerError(
            f"the state dict has 'step' 0 and states of earlier steps, for {len(names)} parameters ({names[0]} ...): "
            "shards begin with new states at the first step. Set 'step' to 1 or more, or remove these states"
        )


def _check_masters(masters: Sequence[tuple[Unit, int, dict[str, Any]]], ranks: Ranks) -> None:
    """Raises where a master does not round to the model's parameter: it would change the weights."""
    differ = []
    for unit, k, entry in masters:
        whole = from_rank_0(entry["master"], unit)
        unequal = False
        if (piece := unit.layout.piece(ranks.shard.rank, k)) is not None:
            mine = unit.store.read_state(unit.index, "master", piece.shard_start, piece.shard_stop)
            theirs = whole[piece.slot_start : piece.slot_stop].to(mine.device)
            unequal = not torch.equal(*(as_bytes(rounded(each, unit.dtype)) for each in (mine, theirs)))
        differ.append(unequal)
    anywhere = ranks.anywhere(differ, "the state dict's masters")
    if names := [u.layout.slots[k].name for (u, k, _), flag in zip(masters, anywhere, strict=True) if flag]:
        raise ZeroError(
            f"the fp32 masters in the state dict differ from the model's weights, for {len(names)} parameters "
            f"({names[0]} ...): load the weights first, with model.load_state_dict. Or, to keep the model's weights "
            "with these optimizer states, remove state_dict['masters']"
        )


def _clear(unit: Unit, k: int, form: StateFormat) -> None:
    """Resets the states to those before the first step, as torch does for a parameter without an entry."""
    numel = unit.layout.slots[k].numel
    for name in unit.store.state_names():
        if name in form.stepped:
            first = float(form.built[name].reshape(-1)[0]) if name in form.built else 0.0
            unit.write_part(name, k, torch.full((numel,), first, dtype=torch.float32, device=unit.ranks.device))
    for name, shape in unit.shaped(k).items():
        unit.write_shaped(k, name, torch.zeros(shape, dtype=torch.float32, device=unit.ranks.device))
    unit.steps[k] = 0

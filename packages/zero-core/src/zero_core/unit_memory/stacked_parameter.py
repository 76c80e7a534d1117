"""Cuts a parameter along dimension 0, such as stacked experts: its rows are parameters of several units.

Owns the way between the whole, which never has memory between its uses, and its rows. Not here: the places of the rows
(in hooks/parameter_access.py), the rows of each group of experts (in model/unit_plan.py).

[Note: a parameter in rows]
The user's parameter stays in the model and in the optimizer, with its name and its shape. The rows are parameters that
only the modules of groups have. A computation with the whole gets its rows joined, and its writes are cut:

    forward     group [0:4] ... group [12:16]      rows, unit by unit; nobody asks for the whole
    p.square()  rows are joined                    its gradient arrives at p, and is cut into the rows'
    p.grad, full_gradient, full_state, state_dict  read row by row, into one tensor
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..active_calls import not_traced, outside_transforms
from ..errors import GradientError, ZeroError
from ..layout import Rows
from ..model.aliases import Follower
from ..model.initial_values import become
from ..model.unit_plan import Grouped
from ..moe.expert_groups import replace, restore
from ..tensors.parameter_home import Home, home_of, set_home
from ..tensors.sharded_parameter import Sharded
from ..tensors.version_counters import Version
from .unit import Unit
from .unit_memory import without_memory

_INSTEAD = "Or pass expert_bytes=None to zero_core.shard, which computes all experts of a block together"


class Stacked(Home):
    """The `Home` of a parameter that is cut into rows. parts: the units that have them, and their numbers there."""

    def __init__(self, parts: Sequence[tuple[Unit, int]]) -> None:
        unit, k = parts[0]
        parameter: Any = unit.wholes[k]
        self.name, self.parameter, self.parts = unit.layout.slots[k].whole.name, parameter, tuple(parts)
        self.like = parameter.detach() if parameter.is_meta else None  # a meta tensor, with its recording
        self.dtype = parameter.dtype  # the user's
        self.kind = type(parameter)  # nn.Parameter, or that of a part of a quantised one

    # -- rows ----------------------------------------------------------------------------------------------------------

    @property
    def places(self) -> list[Any]:
        """The `parameter_access.Place` of each of its rows."""
        return [home_of(unit.parameters[k]) for unit, k in self.parts]

    @property
    def engine(self) -> Any:
        return self.places[0].engine

    @property
    def unit(self) -> Unit:
        """One of its units. All of them are trained, or none."""
        return self.parts[0][0]

    def is_of(self, parameter: Tensor) -> bool:
        return parameter is self.parameter

    def cut(self, whole: Tensor) -> Iterator[tuple[Any, Tensor, nn.Parameter]]:
        """For each of its rows the place, those rows of `whole`, and their parameter."""
        for (unit, k), place in zip(self.parts, self.places, strict=True):
            yield place, whole[_slice(unit, k)], unit.parameters[k]

    def join(self, values: Callable[[Any], Tensor | None]) -> Tensor | None:
        """Joins the whole from `values(place)` for each place of its rows. Rows with None are zeros. Returns None if
        all are None."""
        whole: Tensor | None = None
        for (unit, k), place in zip(self.parts, self.places, strict=True):
            if (part := values(place)) is not None:
                if whole is None:
                    whole = torch.zeros(self.shape, dtype=part.dtype, device=part.device)
                whole[_slice(unit, k)].copy_(part)
        return whole

    @property
    def shape(self) -> tuple[int, ...]:
        unit, k = self.parts[0]
        return unit.layout.slots[k].whole.shape

    def gather(self) -> int:
        """Gives the parameter memory of its own, with the values of its rows, which become views of it. Returns its
        version then."""
        shown = [unit.parameters[k].detach() for unit, k in self.parts]
        self.parameter.__class__ = self.kind
        become(self.parameter, torch.cat(shown))
        for unit, k in self.parts:
            unit.show(k, self.parameter.data[_slice(unit, k)])
        return int(self.parameter._version)

    def count_writes(self, gathered: int) -> None:
        """Counts a write into the whole since it was `gathered` as a write into each of its rows."""
        if self.parameter._version != gathered:
            for unit, k in self.parts:
                increment_version(unit.parameters[k])

    def part(self) -> None:
        """Takes the parameter's memory away again; its rows still show the values."""
        values = self.parameter.data  # also where it was given another
        for unit, k in self.parts:
            unit.show(k, values[_slice(unit, k)])
        self.adopt()

    def adopt(self) -> None:
        """The parameter has no memory from here on."""
        with torch._C.DisableTorchFunctionSubclass():
            unit = self.unit
            become(self.parameter, without_memory(self.shape, unit.dtype, unit.ranks.device))
        self.parameter.__class__ = Sharded

    def unshard(self) -> None:
        """Makes the parameter plain again, with the values of its rows."""
        self.give_back(torch.cat([unit.parameters[k].detach() for unit, k in self.parts]))
        for unit, k in self.parts:  # whose memory goes
            unit.show(k, self.parameter.data[_slice(unit, k)])

    def restore(self) -> None:
        """Makes the parameter plain again after a `shard` that failed: with values, if all of its rows have some."""
        rows = [unit.parameters[k] for unit, k in self.parts]
        known = self.like is None and not any(part.is_meta for part in rows)
        values = torch.cat([part.detach() for part in rows]) if known else torch.empty(self.shape, device="meta")
        self.give_back(values.to(self.dtype) if self.like is None else self.like)

    def give_back(self, values: Tensor) -> None:
        """Makes the parameter plain again, with these values."""
        set_home(self.parameter, None)
        self.parameter.__class__ = self.kind
        become(self.parameter, values)
        self.parameter.__class__ = self.kind  # which a tensor without memory loses

    # -- `parameter_home.Home` -----------------------------------------------------------------------------------------

    @outside_transforms
    def full_copy(self, parameter: Tensor) -> Tensor:
        unit = self.unit
        whole = torch.empty(self.shape, dtype=unit.dtype, device=unit.ranks.device)
        with torch.no_grad():
            for place, rows, part in self.cut(whole):
                rows.copy_(place.full_copy(part))
                place.engine.copies.taken.pop((place.unit.index, place.index), None)  # it is in the whole
        return whole

    def write_back(self, parameter: Tensor, values: Tensor, uncounted: Tensor | None) -> None:
        for place, rows, part in self.cut(values):
            place.write_back(part, rows, part)
        if uncounted is not None:
            increment_version(self.parameter)

    def overwrite(self, parameter: Tensor, values: Tensor) -> bool:
        written = [place.overwrite(part, rows) for place, rows, part in self.cut(values)]
        if all(written):
            increment_version(self.parameter)
        return all(written)

    def take_values(self, parameter: Tensor, values: Tensor) -> None:
        for place, rows, part in self.cut(values):
            place.take_values(part, rows)

    def versions(self, parameter: Tensor) -> list[Version]:
        return [unit.versions[k] for unit, k in self.parts]

    def note_external_use(self, parameter: Tensor) -> None:
        for place in self.places:
            place.note_external_use(parameter)

    def held_gradient(self, parameter: Tensor) -> Stacked | None:
        return self if any(unit.gradient.holds(k) for unit, k in self.parts) else None

    def drop_gradient(self, parameter: Tensor) -> None:
        for place in self.places:
            place.drop_gradient(place.unit.parameters[place.index])

    def refuse_hook(self, parameter: Tensor) -> None:
        raise GradientError(
            f"a hook on {self.name} would see no gradient, because its experts are computed in groups. Read the "
            "gradient with zero_core.full_gradient and change it with zero_core.set_full_gradient, after backward() "
            f"and before step(). {_INSTEAD}"
        )

    def inputs(self, parameter: Tensor) -> list[Any]:
        self.follow()
        return [parameter, *(unit.parameters[k] for unit, k in self.parts)]

    def follow(self) -> None:
        """Its rows require gradients where it does now."""
        with torch._C.DisableTorchFunctionSubclass():
            for unit, k in self.parts:
                if unit.parameters[k].requires_grad != self.parameter.requires_grad:
                    unit.parameters[k].requires_grad_(self.parameter.requires_grad)

    def joined(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        own, *parts = gradients
        if (like := next((part for part in parts if part is not None), None)) is None:
            return own
        batch = like.dim() - len(self.shape)
        shapes = [(*like.shape[:batch], *unit.layout.slots[k].shape) for unit, k in self.parts]
        rows = [like.new_zeros(s) if g is None else g for g, s in zip(parts, shapes, strict=True)]
        whole = torch.cat(rows, batch)
        return whole if own is None else whole + own

    # -- gradients on their way ----------------------------------------------------------------------------------------

    def attach(self, collect: weakref.WeakMethod[Callable[[Unit, int], None]]) -> list[Any]:
        """Hooks for gradients that reach the whole outside of its groups. If nothing trains it, for those that reach
        the groups, which torch keeps in `.grad` of the whole."""
        me = weakref.ref(self)
        if any(unit.groups[k] is not None for unit, k in self.parts):
            return [hooked(self.parameter, _Cut(me, collect))]
        if not self.unit.dtype.is_floating_point or self.kind is not nn.Parameter:
            return []
        return [hooked(unit.parameters[k], partial(_keep_gradient, me, n)) for n, (unit, k) in enumerate(self.parts)]

    def cut_gradient(self) -> Sequence[tuple[Unit, int]]:
        """Its `.grad`, if it is trained and has one, becomes that of its rows. Returns their units and numbers then."""
        with torch._C.DisableTorchFunctionSubclass():
            gradient = self.parameter.grad
            if gradient is None or self.parts[0][0].groups[self.parts[0][1]] is None:
                return ()
            self.parameter.grad = None
            for unit, k in self.parts:
                unit.parameters[k].grad = gradient[_slice(unit, k)]
        return self.parts


def _slice(unit: Unit, k: int) -> slice:
    rows: Rows = unit.layout.slots[k].whole
    return slice(rows.start, rows.stop)


def hooked(parameter: Any, hook: Callable[[Tensor], None]) -> Any:
    """Calls `hook` when a gradient of the parameter is complete, also if none is required now. Returns its handle."""
    with torch._C.DisableTorchFunctionSubclass():
        wanted = parameter.requires_grad
        parameter.requires_grad_(True)  # the hook can only be put where a gradient can arrive
        handle = parameter.register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(wanted)
    return handle


@dataclass(frozen=True)
class _Cut:
    """A gradient of the whole is complete: it is cut into those of the rows. Weakly, as `attach_hooks` says."""

    of: weakref.ref[Stacked]
    collect: weakref.WeakMethod[Callable[[Unit, int], None]]
    takes_gradient: ClassVar[bool] = True

    def __call__(self, parameter: Tensor) -> None:
        of, collect = self.of(), self.collect()
        if of is None or collect is None:
            return
        for unit, k in of.cut_gradient():
            collect(unit, k)


def _keep_gradient(stacked: weakref.ref[Stacked], number: int, part: Tensor) -> None:
    """Adds a complete gradient of rows that no optimizer trains to the whole's `.grad`."""
    if (of := stacked()) is None:
        return
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        gradient, part.grad = part.grad, None
        whole: Any = of.parameter
        if gradient is not None:
            if whole.grad is None:
                whole.grad = torch.zeros(of.shape, dtype=gradient.dtype, device=gradient.device)
            whole.grad[_slice(*of.parts[number])].add_(gradient)


class Stacks:
    """All that is cut of one sharded model: the stacks of experts and their groups, and the parameters of these."""

    def __init__(self, grouped: Sequence[Grouped] = (), parameters: Iterable[Stacked] = ()) -> None:
        self.grouped, self.parameters = tuple(grouped), tuple(parameters)

    def connect(self, choose: Callable[..., list[bool]], units: Mapping[int, Sequence[int]]) -> list[Any]:
        """The parameters say where they live, and experts run in groups. Returns the handles of hooks.

        choose: which groups a forward without gradients calls, see hooks/parameter_access.py. units: by the ids of
        modules, those that they open.
        """
        for stacked in self.parameters:
            set_home(stacked.parameter, stacked)
        handles = []
        for each in self.grouped:
            replace(each.stack, each.groups, each.edges, partial(choose, [units[id(group)] for group in each.groups]))
            own = {id(parameter) for parameter in each.stack.parameters.values()}
            homes = [stacked for stacked in self.parameters if id(stacked.parameter) in own]
            handles.append(each.stack.module.register_forward_pre_hook(not_traced(partial(_follow, homes))))
        return handles

    def disconnect(self) -> None:
        """The stock forwards are back, and parameters have their own class, without memory."""
        for each in self.grouped:
            restore(each.stack)
        for stacked in self.parameters:
            stacked.parameter.__class__ = stacked.kind

    def leave_behind(self) -> None:
        """Makes the parameters that are still in these shards unusable."""
        for stacked in self.parameters:
            if stacked.parameter.__dict__.get("_zero_home") is stacked:
                stacked.parameter.__class__ = Sharded


def _follow(stacked: Sequence[Stacked], module: nn.Module, args: Any) -> None:
    """Before experts run."""
    for each in stacked:
        each.follow()


def refuse_cut(stacked: Stacked, followers: Sequence[Follower]) -> None:
    """Raises ZeroError for hooks and tensors that would not follow a parameter into its rows."""
    parameter: Any = stacked.parameter
    with torch._C.DisableTorchFunctionSubclass():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    if hooks:
        raise ZeroError(
            f"{stacked.name} has gradient hooks, which would see no gradient, because its experts are computed in "
            f"groups: remove the hooks. {_INSTEAD}"
        )
    if followers:
        raise ZeroError(
            f"a plain tensor in an attribute of the model shares the memory of {stacked.name}. After zero_core.shard, "
            f"groups of experts have separate memory: delete the tensor, or replace it by its clone(). {_INSTEAD}"
        )

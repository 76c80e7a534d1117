"""Decides which parameters form a unit, and which modules open it. Reads modules, changes nothing.

By default, every child of every ModuleList is a unit, and so is every large embedding and head. The rest belongs to the
root. Modules which run on some ranks only (experts, in a ModuleList inside a block) belong to their block's unit. One
rank alone may have each of them in a unit of its own (`expert_bytes`), which is in use while it is called. Tied
parameters put the modules that hold them into one unit. The parameters of one module form several units where they
differ in dtype, or where only some are trained. A frozen parameter has any dtype, but no gradient, master or states.
A parameter of several parts, as quantised weights are, is in units part by part: [Note: the parts of a parameter].
Stacked experts may be cut into groups (`expert_bytes`), each a unit of rows of the stacked parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ZeroError
from ..layout import Rows
from ..moe.expert_groups import Stack, find_lists, find_stacks, make_groups
from ..tensors.inner_tensors import named_parts, parts_of
from .tiled_linear import TiledLinear

_APART = 0.01  # an embedding or a head with this share of the model's elements is a unit of its own


@dataclass
class UnitPlan:
    """One unit to be: its modules (by qualified name), and its parameters, all of one dtype, in naming order.

    trained: all of its parameters are; else none is. exact: floats of quantised parameters, which are not cast.
    owners: by name, the quantised parameters whose parts these are. rows, wholes: by name, for rows of a parameter that
    is cut, the range of rows and that parameter. depth: number of units in use around it, without the model's own: 1
    inside a block. listed: an expert of a list, which a forward calls or not, depending on its batch.
    """

    name: str
    trained: bool = True
    modules: dict[str, nn.Module] = field(default_factory=dict)
    beside: int | None = None  # the same number for all units that the same modules open; None: there is one
    parameters: dict[str, Tensor] = field(default_factory=dict)
    exact: bool = False
    owners: dict[str, nn.Parameter] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    wholes: dict[str, Tensor] = field(default_factory=dict)
    depth: int = 0
    listed: bool = False

    def add(self, name: str, part: Tensor, owner: nn.Parameter | None, of: tuple[Rows, Tensor] | None = None) -> None:
        """Adds a parameter, or a part of the quantised parameter `owner`. of: its rows, and the whole."""
        self.parameters[name] = part
        if owner is not None:
            self.owners[name] = owner
        if of is not None:
            self.rows[name], self.wholes[name] = of

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.parameters.values())).dtype

    @property
    def own_dtype(self) -> torch.dtype | None:
        """Returns the dtype of a frozen unit that is never cast: integers, 8-bit floats, `exact`. None: it is cast."""
        cast = self.dtype.is_floating_point and self.dtype.itemsize > 1 and not self.exact
        return None if self.trained or cast else self.dtype

    @property
    def encloses(self) -> bool:
        """Whether the model itself opens the unit: then it is in use from the first unit's turn to that of the last."""
        return "" in self.modules


class Grouped(NamedTuple):
    """Stacked experts that are cut into groups [a, b) of `edges`, each computed by a module."""

    stack: Stack
    edges: list[tuple[int, int]]
    groups: tuple[nn.Module, ...]

    def named(self) -> dict[str, nn.Module]:
        """Returns the groups by the names of their units."""
        return {f"{self.stack.path}[{a}:{b}]": group for (a, b), group in zip(self.edges, self.groups, strict=True)}


def cut_experts(
    model: nn.Module,
    expert_bytes: int | None,
    param_dtype: torch.dtype | None = None,
    classes: Sequence[type[nn.Module]] | None = None,
    several: bool = False,
) -> tuple[list[Grouped], dict[str, nn.Module]]:
    """Cuts a mixture's experts that would unshard more than `expert_bytes` at once. Returns stacks of experts in groups
    of fewer bytes, and the experts of lists, by qualified name: each of these can be a unit. None: all are left whole.

    param_dtype: dtype in which floats are computed; None: their own. classes: form units, as in `plan_units`; lists of
    experts that contain units stay as they are. several: there are several ranks. Then lists stay as they are, because
    a forward calls the experts that its batch needs, so ranks would gather different ones; and so do stacks that share
    a unit module. A block of Ernie 4.5 VL runs one for text, and one for images where a rank's batch has some. Several
    experts of a list in one unit would all be gathered for each that is called. Raises ZeroError for less than a byte.
    """
    if expert_bytes is None:
        return [], {}
    if expert_bytes < 1:
        raise ZeroError(f"expert_bytes={expert_bytes}: it is the most bytes of a group of experts, 1 or more, or None")
    opening, stacks = unit_modules(model, classes), list(find_stacks(model).values())
    if several and len(stacks) > 1:
        around = {id(m): path for path, unit in reversed(opening.items()) for m in unit.modules()}
        number = Counter(around[id(stack.module)] for stack in stacks)
        stacks = [stack for stack in stacks if number[around[id(stack.module)]] == 1]
    found: list[Grouped] = []
    for stack in stacks:
        own: torch.dtype = max(stack.parameters.values(), key=torch.numel).dtype
        edges = stack.cut(max(1, expert_bytes * own.itemsize // _itemsize(own, param_dtype)))
        if len(edges) > 1:
            found.append(Grouped(stack, edges, make_groups(stack, edges)))
    listed: dict[str, nn.Module] = {}
    opened = {id(module) for module in opening.values()}
    for experts in () if several else find_lists(model).values():
        parameters = [p for expert in experts.values() for p in expert.parameters()]
        nbytes = sum(p.numel() * _itemsize(p.dtype, param_dtype) for p in parameters)
        if nbytes > expert_bytes and not any(id(m) in opened for e in experts.values() for m in e.modules()):
            listed |= experts
    return found, listed


def _itemsize(own: torch.dtype, param_dtype: torch.dtype | None) -> int:
    """Returns the bytes of a parameter's element in the dtype of computation."""
    cast = param_dtype is not None and own.is_floating_point and own.itemsize > 1
    return param_dtype.itemsize if cast and param_dtype is not None else own.itemsize


def unit_modules(model: nn.Module, classes: Sequence[type[nn.Module]] | None = None) -> dict[str, nn.Module]:
    """Returns qualified name -> module, for every module that opens a unit; the root, "", last."""
    found: dict[str, nn.Module] = {}

    def descend(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if any(child is f for f in found.values()):
                continue
            opens = _is_block(module, child) if classes is None else isinstance(child, tuple(classes))
            if opens:
                found.update(_tiles(path, child))
                found[path] = child
            else:
                descend(path, child)

    descend("", model)
    if classes is None:
        found.update(_large_leaves(model, found))
    found[""] = model
    return found


def _tiles(prefix: str, unit: nn.Module) -> dict[str, nn.Module]:
    """Returns the tiles of tiled linears inside a unit. They are units of their own: unlike experts they run on every
    rank."""
    return {
        ".".join(filter(None, (prefix, name, "tiles", str(index)))): tile
        for name, module in unit.named_modules()
        if isinstance(module, TiledLinear)
        for index, tile in enumerate(module.tiles)
    }


def _is_block(parent: nn.Module, child: nn.Module) -> bool:
    container = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
    return isinstance(parent, nn.ModuleList) and not container and next(child.parameters(), None) is not None


def _large_leaves(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    total = sum(p.numel() for p in model.parameters())
    inside = {id(m) for block in blocks.values() for m in block.modules()}
    return {
        path: module
        for path, module in model.named_modules()
        if path
        and id(module) not in inside
        and isinstance(module, (nn.Embedding, nn.EmbeddingBag, nn.Linear))
        and _own_numel(module) >= _APART * total
    }


def _own_numel(module: nn.Module) -> int:
    """Returns the elements of a leaf's weight, without reading `.weight`: a parametrised module computes it, and may
    draw random numbers for it."""
    weight = module._parameters.get("weight")
    return weight.numel() if weight is not None else sum(p.numel() for p in module.parameters())


def plan_units(
    model: nn.Module,
    classes: Sequence[type[nn.Module]] | None = None,
    optimized: Container[int] | None = None,
    grouped: Sequence[Grouped] = (),
    listed: Mapping[str, nn.Module] | None = None,
) -> list[UnitPlan]:
    """Returns units in the order of their first parameter's name, an enclosing one before those inside it. Every
    parameter is in exactly one.

    A parameter is trained if it requires a gradient and its id is among those `optimized`; None: all are. grouped,
    listed: the result of `cut_experts`.
    """
    listed = listed or {}
    modules = {**listed, **unit_modules(model, classes)}
    cut: dict[int, list[tuple[int, int, str, Any]]] = {
        id(parameter): [(*edge, path, group._parameters[key]) for edge, (path, group) in zip(edges, named, strict=True)]
        for each in grouped
        for edges, named in [(each.edges, each.named().items())]
        for key, parameter in each.stack.parameters.items()
    }
    owner: dict[int, str] = {}  # id(module) -> nearest enclosing unit module
    for path, module in modules.items():
        for inner in module.modules():
            # found modules nest only where the outer comes later and takes the rest: blocks, the root
            owner.setdefault(id(inner), path)
    homes: dict[int, list[str]] = {}  # id(parameter) -> unit modules that hold it
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and owner[id(module)] not in homes.setdefault(id(parameter), []):
                homes[id(parameter)].append(owner[id(module)])
    for each in grouped:
        modules |= each.named()
    merged = _merge(modules, homes.values())
    opening: dict[str, dict[str, nn.Module]] = {}
    for path, module in modules.items():
        opening.setdefault(merged[path], {})[path] = module
    plans: dict[_Key, UnitPlan] = {}
    twins: dict[str, list[_Key]] = {}  # the units of the same modules

    def plan_of(lead: str, dtype: torch.dtype, trained: bool, exact: bool = False) -> UnitPlan:
        key = (lead, dtype, trained, exact)
        if key not in plans:
            label = _label(key, twins.setdefault(lead, []))
            twins[lead].append(key)
            plans[key] = UnitPlan(label, trained, opening[lead], exact=exact, listed=lead in listed)
        return plans[key]

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, part, parameter, _, quantised in named_parts(model):
        trained = parameter.requires_grad and (optimized is None or id(parameter) in optimized)
        exact = quantised and part.is_floating_point() and part.dtype.itemsize > 1
        for start, stop, path, some in cut.get(id(parameter), ()):
            plan, called = plan_of(path, part.dtype, trained, exact), f"{name}[{start}:{stop}]"
            rows = Rows(name, tuple(part.shape), start, stop), part
            plan.add(called, parts_of(some)[name.removeprefix(names[id(parameter)])], some if quantised else None, rows)
        if id(parameter) not in cut:
            plan = plan_of(merged[homes[id(parameter)][0]], part.dtype, trained, exact)
            plan.add(name, part, parameter if quantised else None)
    together = Counter(lead for lead, *_ in plans)
    numbers = {lead: number for number, lead in enumerate(together) if together[lead] > 1}
    for (lead, *_), plan in plans.items():
        plan.beside = numbers.get(lead)
    return _nested(plans, merged)


def _nested(plans: Mapping[_Key, UnitPlan], merged: Mapping[str, str]) -> list[UnitPlan]:
    """Sets the depth of each, and sorts an enclosing unit before those inside it."""
    around: dict[str, list[str]] = {}  # the first of a unit's modules -> that of each unit around it, outermost first
    for path, lead in merged.items():
        steps = path.replace("[", ".[").split(".")  # a group is inside of its stack's module
        above = [merged[p] for p in (".".join(steps[:n]) for n in range(1, len(steps))) if p in merged]
        around.setdefault(lead, [each for each in dict.fromkeys(above) if each != lead])
    firsts: dict[str, int] = {}
    for number, (lead, *_) in enumerate(plans):
        for each in (*around[lead], lead):
            firsts.setdefault(each, number)
    leads = {lead for lead, *_ in plans}
    outer = {lead: [each for each in around[lead] if each in leads] for lead in leads}
    families = {lead for lead, found in outer.items() if found} | {each for found in outer.values() for each in found}
    order: dict[_Key, tuple[int, ...]] = {}
    for number, (key, plan) in enumerate(plans.items()):
        nested = [*outer[key[0]], key[0]]
        plan.depth = len(nested) - 1
        order[key] = (*(firsts[lead] for lead in nested), -1, number) if key[0] in families else (number,)
    return [plans[key] for key in sorted(plans, key=order.__getitem__)]


_Key = tuple[str, torch.dtype, bool, bool]  # the first of its modules, dtype, trained, exact


def _label(key: _Key, twins: Sequence[_Key]) -> str:
    """Returns the name of a unit. `twins`: units of the same modules that have names already."""
    lead, dtype, trained, exact = key
    parts = [lead or "root"]
    if exact:
        parts.append("exact")
    if any(twin[2] != trained for twin in twins):
        parts.append("trained" if trained else "frozen")
    if any(twin[1] != dtype for twin in twins):
        parts.append(str(dtype).replace("torch.", ""))
    return ":".join(parts)


def _merge(modules: dict[str, nn.Module], sharing: Iterable[list[str]]) -> dict[str, str]:
    """Returns unit module -> the first of those it shares a parameter with, directly or through others."""
    lead = {path: path for path in modules}
    for paths in sharing:
        if len(paths) > 1:
            joined = {lead[path] for path in paths}
            first = next(path for path in modules if path in joined)
            lead = {path: first if at in joined else at for path, at in lead.items()}
    return lead

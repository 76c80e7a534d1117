"""Cuts a mixture's stacked experts into groups along the expert dimension, and runs each group by itself.

Owns which modules are stacks of experts, the modules of groups, and the forward that replaces a stack's. Knows neither
units nor ranks. A group runs the stock class's own forward: [Note: pairs as tokens].

[Note: pairs as tokens]
A stack's forward gets hidden_states (tokens, width), top_k_index and top_k_weights (tokens, k), and returns for each
token the sum over its k slots of the weight times the expert's output. Each pair of a token and a slot is a token with
one slot of its own. So the pairs of one group are handed to the stock forward of a module that has only the group's
experts, with k = 1, and the results are summed per token. Nothing depends on how the experts are laid out (transposed,
interleaved, with biases), nor on which implementation computes them.

A stack is recognised by the contract of transformers' `use_experts_implementation`, under which an implementation that
knows only the attributes named there may replace the class's own forward: `_marks`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ZeroError
from ..tensors.inner_tensors import parts_of, wraps
from .lora_experts import Adapters, Added, can_be_adapted, like, next_call, tensors_of, wrappers_of
from .nested_checkpoint import Part, PartsAgain
from .token_dispatch import Pairs

Edges = Sequence[tuple[int, int]]
Agree = Callable[[list[bool]], list[bool]]

_GROUPS = "_zero_groups"
_not_traced = torch.compiler.disable(reason="experts in groups: which have tokens is asked for, and hooks gather them")
_INTERNALS = frozenset(nn.Module().__dict__) - {"training"} | {_GROUPS, "forward", "num_experts"}


@dataclass(frozen=True, eq=False)
class Stack:
    """A module whose parameters `names` hold `experts` experts along dimension 0. Its other parameters are not cut."""

    path: str
    module: nn.Module
    experts: int
    names: tuple[str, ...]
    adapters: Adapters

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: self.module._parameters[name] for name in self.names}  # type: ignore[misc]

    def cut(self, group_bytes: int) -> list[tuple[int, int]]:
        """Edges [a, b) of as few groups as keep within `group_bytes` of parameters each, or have one expert.

        Groups follow one another, and their sizes differ by at most one.
        """
        one = sum(p.numel() // self.experts * p.element_size() for p in self.parameters.values())
        groups = -(-self.experts // min(self.experts, max(1, group_bytes // one)))
        return list(pairwise(self.experts * g // groups for g in range(groups + 1)))


def find_lists(model: nn.Module) -> dict[str, dict[str, nn.Module]]:
    """Finds lists of experts: each outermost ModuleList or ModuleDict of experts inside a child of a ModuleList.

    Returns qualified name of the list -> its experts, by qualified name. They are of one class and have parameters of
    the same names, shapes and kinds, which no other module has. The block's own forward calls as many of them as its
    batch needs, in any order. They may be other modules than a mixture's experts, because any module may be a unit.
    """
    holders = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    found: dict[str, dict[str, nn.Module]] = {}
    seen: set[int] = set()

    def descend(path: str, module: nn.Module, inside: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if inside and container and _alike(list(module.children()), holders):
            found[path] = {f"{path}.{name}": child for name, child in module.named_children()}
            return
        for name, child in module.named_children():
            block = isinstance(module, nn.ModuleList) and not isinstance(child, (nn.ModuleList, nn.ModuleDict))
            descend(f"{path}.{name}" if path else name, child, inside or block)

    descend("", model, False)
    return found


def _alike(modules: list[nn.Module], holders: Counter[int]) -> bool:
    kinds = {(type(m), tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters())) for m in modules}
    own = all(holders[id(p)] == 1 for m in modules for p in m.parameters())
    return len(modules) > 1 and len(kinds) == 1 and own and next(modules[0].parameters(), None) is not None


def find_stacks(model: nn.Module) -> dict[str, Stack]:
    """Finds the modules of stacked experts that can be cut, by qualified name, in the order of `model.named_modules()`.

    Left out, and so part of their block: one expert alone; parameters that another module holds too, or that are no
    plain tensors; a forward that somebody replaced; experts that are spread over ranks already.
    """
    holders = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    found = {}
    for path, module in model.named_modules():
        names = _stacked(module) if _marks(module) else ()
        if not names or any(holders[id(module._parameters[name])] > 1 for name in names):
            continue
        experts: Any = module.num_experts
        adapters = Adapters(wrappers_of(model, path), experts)
        if adapters.known(names):
            found[path] = Stack(path, module, experts, names, adapters)
    return found


def _marks(module: nn.Module) -> bool:
    """Whether transformers' contract holds for its forward: see the note at the top."""
    known = module.__dict__
    replaced = known.get("forward")
    return (
        type(known.get("num_experts")) is int
        and known["num_experts"] > 1
        and known.keys() >= {"config", "is_transposed", "has_bias"}
        and hasattr(known["config"], "_experts_implementation")
        and hasattr(type(module).forward, "__wrapped__")  # a subclass with a forward of its own is not under it
        and not known.get("_is_expert_parallel", False)
        and (replaced is None or isinstance(replaced, _GroupedForward))
    )


def _stacked(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parameters that are cut; () if that is not certain."""
    experts: Any = module.num_experts
    own = {name: p for name, p in module._parameters.items() if p is not None}
    names = tuple(name for name, p in own.items() if p.dim() and p.shape[0] == experts)
    plain = all(_is_cut(own[name], experts) for name in names)
    vectors = [t for t in (*own.values(), *module._buffers.values()) if t is not None and t.dim() == 1]
    unsure = any(v.shape[0] == experts for v in vectors) and any(experts in own[n].shape[1:] for n in names)
    return names if plain and not unsure else ()


def _is_cut(parameter: nn.Parameter, experts: int) -> bool:
    """Whether rows of the parameter are a tensor of its kind over rows of its memory, and so are those of its parts if
    it is quantised."""
    if "_zero_home" in parameter.__dict__:
        return True
    parts = parts_of(parameter) if wraps(type(parameter)) else {}
    rows = all(part.dim() and part.shape[0] == experts for part in parts.values())
    return type(parameter) in (nn.Parameter, Tensor) or (bool(parts) and "" not in parts and rows)


def make_groups(stack: Stack, edges: Edges) -> tuple[nn.Module, ...]:
    """Returns a module of the stack's class for each [a, b) of `edges`. Its parameters are rows [a, b) of the stack's.

    They share the stack's memory, and whatever else the stack has when it runs. They are not submodules of the model,
    whose names are unchanged.
    """
    return tuple(_group(stack, start, stop) for start, stop in edges)


def _group(stack: Stack, start: int, stop: int) -> nn.Module:
    group: nn.Module = object.__new__(type(stack.module))
    nn.Module.__init__(group)
    cut = {name: (_rows(p, start, stop), p.requires_grad) for name, p in stack.parameters.items()}
    group._parameters.update({name: nn.Parameter(*each) for name, each in cut.items()})
    group.__dict__["num_experts"] = stop - start
    _share(stack.module, [group], [(start, stop)])
    if stack.adapters.wrappers:
        can_be_adapted(group)
    return group


def _rows(parameter: nn.Parameter, start: int, stop: int) -> Tensor:
    """Returns rows [start, stop) of the parameter: over its memory, or on meta where it is sharded and has none."""
    with torch._C.DisableTorchFunctionSubclass():
        if not parameter.is_meta and not parameter.untyped_storage().nbytes():
            return torch.empty((stop - start, *parameter.shape[1:]), dtype=parameter.dtype, device="meta")
        return parameter.detach()[start:stop]


def _share(module: nn.Module, groups: Sequence[nn.Module], edges: Edges) -> None:
    """Gives groups all current attributes of the stack except its stacked parameters: settings, submodules, buffers."""
    shared = {key: value for key, value in module.__dict__.items() if key not in _INTERNALS}
    shared |= module._modules
    shared |= {k: p for k, p in module._parameters.items() if k not in groups[0]._parameters}
    experts: Any = module.num_experts
    cut = {k: b for k, b in module._buffers.items() if b is not None and b.dim() and b.shape[0] == experts}
    shared |= {k: b for k, b in module._buffers.items() if k not in cut}
    for group, (start, stop) in zip(groups, edges, strict=True):
        group.__dict__.update(shared)
        group.__dict__.update({name: buffer[start:stop] for name, buffer in cut.items()})


def run_groups(
    groups: Sequence[nn.Module],
    edges: Edges,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    agree: Agree | None = None,
    added: Sequence[Added] = (),
    again: PartsAgain | None = None,
) -> Tensor:
    """Returns the result of the stack's forward, (tokens, width), computed by its groups one after another.

    Every group is called once, in order. One without pairs gets a token of zeros, whose result is dropped and whose
    gradients are zeros. So its hooks run, forward and backward, whatever a rank's batch holds. agree: maps the groups
    with pairs on this rank to the groups that are called; given only without gradients. added: the adapters' factors
    for each group. again: how groups run inside of a checkpoint, [Note: parts inside of a checkpoint].
    """
    if hidden_states.dim() != 2 or top_k_index.dim() != 2:
        raise ZeroError(
            f"experts in groups take hidden_states (tokens, width) and top_k_index (tokens, k), not "
            f"{tuple(hidden_states.shape)} and {tuple(top_k_index.shape)}: flatten the tokens before they are called"
        )
    pairs = Pairs(top_k_index, edges)
    counts = pairs.counts()
    called = [True] * len(groups) if agree is None else agree([n > 0 for n in counts])
    parts: dict[int, Part] = {}
    for at, (rows, weights) in enumerate(pairs.take(hidden_states, top_k_weights)):
        if counts[at]:
            index = (pairs.experts[pairs.bounds[at] : pairs.bounds[at + 1]] - edges[at][0])[:, None]
            given = [rows, index, weights]
        elif called[at]:
            given = _nothing(hidden_states, top_k_index, top_k_weights)
        else:
            continue
        extra = added[at : at + 1]
        given = [*given, *(t for each in extra for t in tensors_of(each))]
        trained = any(p is not None and p.requires_grad for p in groups[at]._parameters.values())
        parts[at] = Part(_run(groups[at], *extra), given, trained)
    del given, rows, weights
    run = (again or PartsAgain()).ready(list(parts.values()), kept=not any(added))
    outputs = {at: run(part) for at, part in parts.items()}
    idle = [outputs.pop(at) for at in parts if not counts[at]]
    return pairs.put(outputs, idle, hidden_states)


def _run(group: nn.Module, added: Added | None = None) -> Callable[..., Tensor]:
    """Returns a function that runs a group on rows, an index, weights and the tensors of `added`."""

    def run(rows: Tensor, index: Tensor, weights: Tensor, *factors: Tensor) -> Tensor:
        if added is not None:
            next_call(group, like(added, factors))
        return group(rows, index, weights)

    return run


def _nothing(hidden: Tensor, index: Tensor, weights: Tensor) -> list[Tensor]:
    """Returns a token of zeros with a weight of zero, which requires gradients where the real ones do."""
    row = hidden.new_zeros(1, hidden.shape[-1], requires_grad=hidden.requires_grad)
    weight = weights.new_zeros(1, 1, requires_grad=weights.requires_grad)
    return [row, index.new_zeros(1, 1), weight]


class _GroupedForward:
    """A stack's forward while its experts are in groups. Its arguments have the names of the class's own."""

    def __init__(self, stack: Stack, groups: tuple[nn.Module, ...], edges: Edges, agree: Agree | None) -> None:
        self.module, self.adapters = stack.module, stack.adapters
        self.groups, self.edges, self.agree = groups, edges, agree
        self.signature = inspect.signature(type(stack.module).forward)
        self.own = stack.parameters
        self.again = PartsAgain()

    @_not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if any(self.module._parameters.get(name) is not parameter for name, parameter in self.own.items()):
            return type(self.module).forward(self.module, *args, **kwargs)  # others, as torch.func.functional_call's
        _, hidden_states, top_k_index, top_k_weights = self.signature.bind(self.module, *args, **kwargs).args
        _share(self.module, self.groups, self.edges)
        added = self.adapters.of_groups([b - a for a, b in self.edges]) if self.adapters.wrappers else []
        agree = None if torch.is_grad_enabled() else self.agree
        given = hidden_states, top_k_index, top_k_weights
        return run_groups(self.groups, self.edges, *given, agree, added, self.again)


def replace(stack: Stack, groups: tuple[nn.Module, ...], edges: Edges, agree: Agree | None = None) -> None:
    """Makes the stack's forward run the groups.

    agree: in forwards without gradients, maps the groups with tokens on this rank to those that every rank calls.
    """
    stack.module.__dict__[_GROUPS] = groups
    stack.module.forward = _GroupedForward(stack, groups, list(edges), agree)
    stack.adapters.replace()


def restore(stack: Stack) -> None:
    """Gives the stack its stock forward back."""
    stack.module.__dict__.pop("forward", None)
    stack.module.__dict__.pop(_GROUPS, None)
    stack.adapters.restore()

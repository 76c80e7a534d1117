"""Finds tensors of a model that share memory, and decides which of them can follow a parameter into shards.

Reads shapes, strides and addresses, never values, and changes nothing.

[Note: tensors over one memory]
Shards give each parameter memory of its own. Where two tensors share memory, torch shows a write into one in the other,
and that has to stay true or to be refused:
- A plain tensor over all of one parameter follows the parameter (`Follower`), as `CB` of bitsandbytes' layers. It may
  be an attribute of any module or parameter, in lists and dicts too, or of an object that is such an attribute.
- Two parameters are refused if either is trained. Torch updates the same memory once for each trained one, with states
  of their own. Neither a tied parameter nor two shards give these numbers.
- Two parameters that are not trained become one if elements, class and attributes are the same and no hook is on them
  (`Twins`). Others are refused. Parts of quantised parameters are not, as nothing writes them.
- A buffer over a parameter is refused, as it would be saved, broadcast and moved as a tensor of its own.
- A tensor over a parameter of a model that was sharded before is refused, as that memory is no longer in use.
Parameters that are separate parts of one storage share nothing. Interleaved ones, such as columns of one matrix, count
as sharing memory: only the addresses of the first and the last byte are compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import ShardedParameterError, listed
from ..tensors.inner_tensors import named_parts, wraps

_PLAIN = (int, float, str, bool, bytes, type(None), torch.dtype, torch.device)
_REGISTERED = {"_parameters", "_buffers", "_modules"}  # a module's attributes that are not plain ones
_earlier: list[Extent] = []  # of parameters that were sharded, while other tensors still show the memory they had


class Follower(NamedTuple):
    """A plain tensor over all of the memory of `lead`, a parameter or a part of a quantised one."""

    tensor: Tensor
    lead: Tensor


class Twins(NamedTuple):
    """Two parameters over one memory that differ in nothing: `first` can take the place of `again`."""

    first: nn.Parameter
    again: nn.Parameter

    def tie(self, model: nn.Module) -> None:
        """Let all modules that have `again` have `first`."""
        for module in model.modules():
            for key in [key for key, parameter in module._parameters.items() if parameter is self.again]:
                setattr(module, key, self.first)  # nn.LSTM has lists of its own, which it keeps up to date here


class Extent(NamedTuple):
    """The memory of a tensor: byte `start` to byte `stop` of `space`."""

    space: Any
    start: int
    stop: int
    name: str
    kind: str  # parameter, part (of a quantised one), buffer, attribute; earlier: of another model, before shard
    trained: bool
    tensor: Any
    storage: StorageWeakRef


class Overlaps(NamedTuple):
    """The tensors of a model that share memory. extents: the memory of its parameters, for `remember`."""

    followers: list[Follower]
    twins: list[Twins]
    extents: list[Extent]


def overlaps_of(model: nn.Module, optimized: set[int]) -> Overlaps:
    """The tensors that follow parameters of `model`, and the parameters that can be one.

    optimized: ids of the parameters that an optimizer has. Raises ShardedParameterError for tensors over one memory
    that would be trained apart, naming both and the way out.
    """
    with torch._C.DisableTorchFunctionSubclass():
        parts = _parameters(model, optimized)
        _earlier[:] = [each for each in _earlier if not each.storage.expired()]
        others = [(name, buffer, "buffer") for name, buffer in model.named_buffers()]
        known = {*(id(each.tensor) for each in parts), *map(id, model.parameters()), *(id(b) for _, b, _ in others)}
        others += [(name, tensor, "attribute") for name, tensor in _attributes(model, known)]
        found = [_extent(name, tensor, kind) for name, tensor, kind in others]
        followers: dict[int, Follower] = {}
        twins: dict[int, Twins] = {}
        meetings = _meetings([*_earlier, *parts, *(each for each in found if each is not None)])
        refused = []
        for first, second in meetings:
            if first.kind == "earlier":
                if second.kind != "earlier" and (first.trained or second.trained):
                    raise ShardedParameterError(_of_another_model(first, second))
            elif first.kind == second.kind == "parameter":
                if not _alike(first, second) or not optimized.isdisjoint((id(first.tensor), id(second.tensor))):
                    refused.append((first, second))
                twins.setdefault(id(second.tensor), Twins(first.tensor, second.tensor))
        if refused:
            raise ShardedParameterError(_two_parameters(*refused[0]) + _more(refused))
        for first, second in meetings:
            if first.kind in ("parameter", "part") and second.kind in ("buffer", "attribute"):
                followers.setdefault(id(second.tensor), _follower(first, second))
        return Overlaps(list(followers.values()), list(twins.values()), parts)


def remember(extents: Sequence[Extent]) -> None:
    """Records the memory of parameters that were sharded: tensors that still show it no longer have their values."""
    gone = [each._replace(kind="earlier", tensor=None) for each in extents if each.space[0] != "meta"]
    _earlier.extend(each for each in gone if not each.storage.expired())


def _parameters(model: nn.Module, optimized: set[int]) -> list[Extent]:
    found: dict[int, Extent] = {}
    for name, part, parameter, _, quantised in named_parts(model):
        trained = parameter.requires_grad and id(parameter) in optimized
        if (extent := _extent(name, part, "part" if quantised else "parameter", trained)) is None:
            continue
        found.setdefault(id(part), extent)
        reach = 0
        for step, n in sorted((step, n) for step, n in zip(part.stride(), part.shape, strict=True) if n > 1):
            if trained and step <= reach:
                raise ShardedParameterError(
                    f"{name} {tuple(part.shape)} has the strides {part.stride()}, so several of its elements share one "
                    f"place in memory: give it memory of its own, `{_path(name)} = "
                    f"nn.Parameter({_path(name)}.detach().clone())`, before you build the optimizer"
                )
            reach += step * (n - 1)
    return list(found.values())


def _extent(name: str, tensor: Tensor, kind: str, trained: bool = False) -> Extent | None:
    """Returns None for a tensor without memory, or with memory that is not known."""
    if wraps(type(tensor)) or tensor.layout is not torch.strided or not tensor.numel():
        return None
    if tensor.__dict__.get("_zero_home") is not None:
        return None  # it is in shards
    storage = tensor.untyped_storage()
    size = tensor.element_size()
    if tensor.is_meta:  # without addresses, the storage tells one memory from another
        space, start = ("meta", storage._cdata), tensor.storage_offset() * size
    else:
        space, start = (str(tensor.device), 0), tensor.data_ptr()
        if not start:
            return None
    elements = 1 + sum(step * (n - 1) for step, n in zip(tensor.stride(), tensor.shape, strict=True))
    stop = int(start) + size * elements
    return Extent(space, int(start), stop, name, kind, trained, tensor, StorageWeakRef(storage))


def _attributes(model: nn.Module, known: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules and parameters have as attributes, and their names, each once. known: ids of all others."""
    seen = known | {id(module) for module in model.modules()}
    holders: list[tuple[str, Any]] = [*model.named_modules(), *((p.name, p.tensor) for p in named_parts(model))]
    waiting: deque[tuple[str, Any, int]] = deque()  # the number says how many objects below are looked into
    for path, holder in holders:
        inside = [(key, value) for key, value in vars(holder).items() if not key.startswith("_zero_")]
        waiting += ((f"{path}.{key}".lstrip("."), value, 1) for key, value in inside if key not in _REGISTERED)
    while waiting:
        name, value, objects = waiting.popleft()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, dict):
            waiting += ((f"{name}[{key!r}]", inner, objects) for key, inner in value.items())
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting += ((f"{name}[{k}]", inner, objects) for k, inner in enumerate(value))
        elif isinstance(value, nn.Module) or (objects and not isinstance(value, type)):
            inside_it = getattr(value, "__dict__", None)
            if isinstance(inside_it, dict):
                below = objects - (not isinstance(value, nn.Module))
                waiting += ((f"{name}.{key}", inner, below) for key, inner in inside_it.items())


def _meetings(extents: Sequence[Extent]) -> list[tuple[Extent, Extent]]:
    """Pairs of overlapping extents, in the order in which they were given, which is the same on every rank."""
    pairs = []
    begun: list[int] = []  # and not ended
    for i in sorted(range(len(extents)), key=lambda i: (extents[i].space, extents[i].start)):
        here = extents[i]
        begun = [j for j in begun if extents[j].space == here.space and extents[j].stop > here.start]
        pairs += [(min(i, j), max(i, j)) for j in begun]
        begun.append(i)
    return [(extents[i], extents[j]) for i, j in sorted(pairs)]


def _follower(lead: Extent, other: Extent) -> Follower:
    """Raises ShardedParameterError where it cannot follow."""
    part, tensor = lead.tensor, other.tensor
    if other.kind == "buffer":
        raise ShardedParameterError(
            f"the buffer {other.name} {tuple(tensor.shape)} shares memory with the parameter {lead.name} "
            f"{tuple(part.shape)}, and buffers are not sharded. Delete it and assign a plain attribute, which follows "
            f"the parameter: `del {_path(other.name)}; {_path(other.name)} = {_path(lead.name)}.detach()`. If the "
            "buffer was a part of the parameter, index the attribute in forward(). Or give the buffer memory of its "
            "own with clone(), before zero_core.shard"
        )
    if type(tensor) is not Tensor or tensor.requires_grad or not _same(lead, other):
        raise ShardedParameterError(
            f"the {type(tensor).__name__} {other.name!r} {tuple(tensor.shape)} of {tensor.dtype} shares memory with "
            f"{lead.name} {tuple(part.shape)}, and shards would separate the two. Assign `{_path(lead.name)}.detach()` "
            "in place of that tensor: a view follows the parameter, and forward() can index it. Or give the tensor "
            "memory of its own with clone(), before zero_core.shard"
        )
    return Follower(tensor, part)


def _same(one: Extent, other: Extent) -> bool:
    """Whether both have the same elements in the same order."""
    a, b = one.tensor, other.tensor
    return one.start == other.start and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def _path(name: str) -> str:
    """A parameter's name as a Python expression: `model[0].weight`."""
    return "model" + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in name.split("."))


def _alike(first: Extent, second: Extent) -> bool:
    """Whether two parameters have the same elements in the same order, class, flags and attributes, and no hooks."""
    pair = first.tensor, second.tensor
    hooked = any(t._backward_hooks or getattr(t, "_post_accumulate_grad_hooks", None) for t in pair)
    if hooked or any(t.is_meta for t in pair) or not _same(first, second):
        return False
    attributes = [{key: id(value) for key, value in t.__dict__.items()} for t in pair]
    traits = [(type(t), t.requires_grad) for t in pair]
    return traits[0] == traits[1] and attributes[0] == attributes[1]


def _two_parameters(first: Extent, second: Extent) -> str:
    lead, other = (second, first) if second.trained and not first.trained else (first, second)
    one, again = _path(lead.name), _path(other.name)
    ways = "keep one parameter, and index it in forward()"
    if _same(first, second):
        ways = (
            f"assign one parameter to both: `{again} = {one}`. Or replace {other.name} by a tensor without a gradient: "
            f"`del {again}; {again} = {one}.detach()`"
        )
    return (
        f"{second.name} {tuple(second.tensor.shape)} and {first.name} {tuple(first.tensor.shape)} are two parameters "
        "over the same memory. In torch a write or an update of one changes the other too. In shards it would not. "
        f"Before you build the optimizer, {ways}. Or give {second.name} memory of its own: `{_own_memory(second)}`"
    )


def _more(pairs: Sequence[tuple[Extent, Extent]]) -> str:
    """The rest of the error message: the other pairs, and a hint for adapters of PEFT."""
    others = [f"{second.name} and {first.name}" for first, second in pairs[1:]]
    more = f". The same is true of {listed(others)}" if others else ""
    if any("lora_" in name for name in (pairs[0][0].name, pairs[0][1].name)):
        more += (
            ". PEFT has tied the adapters of an embedding and its head: set ensure_weight_tying to False in its "
            "config, and each adapter has memory of its own"
        )
    return more


def _own_memory(extent: Extent) -> str:
    path, data = _path(extent.name), ".data" if extent.kind == "parameter" else ""
    return f"{path}{data} = {path}{data}.clone()"


def _of_another_model(earlier: Extent, here: Extent) -> str:
    return (
        f"the {here.kind} {here.name} shares memory with {earlier.name} of another model, which is sharded already. In "
        "torch, training one of the two would change the other. In shards it would not. Before shard(), give "
        f"{here.name} memory of its own: `{_own_memory(here)}`. Or shard one module that has both models, with one "
        "parameter in both"
    )

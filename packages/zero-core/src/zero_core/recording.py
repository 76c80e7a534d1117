"""What construction did to parameters, and its replay: the value of each, alone and in any order.

Owns the recorded operations. How they are noticed is `deferred`'s.

[Note: recording]
Inside the context every new parameter is put on the meta device as it is registered, and a dispatch mode notes each
operation that creates or writes meta memory: its arguments, by storage, size, stride and offset. Replaying the
operations that one parameter's storage depends on gives its value, alone and in any order:

    nn.Linear.__init__      Parameter(torch.empty(o, i))   ->  node 7: storage A = empty
    reset_parameters        kaiming_uniform_(weight)       ->  node 8: A.uniform_(-b, b)
    the model's own code    weight[0].zero_()              ->  node 9: view of A .zero_()

Random node k draws from a generator seeded with (seed, k). So a value depends on the seed and on the model's code,
never on the order of materialisation, the number of ranks, the stage or the store. It is not the value that building
without the context draws, where each tensor's numbers depend on all that was drawn before it.
Buffers stay real. Values that construction reads back (`.item()`) are replayed on the spot.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from .errors import DeferredInitError

__all__ = ["UNINITIALISED", "Recording", "Source", "mix", "on_meta"]

UNINITIALISED = (
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
)


@dataclass(frozen=True)
class _View:
    """Where a tensor lies in a recorded storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Real:
    """An argument with memory of its own, kept by reference."""

    tensor: Tensor
    version: int


@dataclass
class _Node:
    """One recorded operation. Arguments hold _View and _Real where tensors were."""

    index: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]  # storages
    writes: tuple[int, ...]  # storages created or changed
    outputs: tuple[_View | None, ...]  # of the flattened results
    seed: int
    uninitialised: bool = False


@dataclass(frozen=True)
class _Home:
    """A parameter, where its values are made, and its version when the context was left."""

    parameter: nn.Parameter
    view: _View
    version: int


class Source(Protocol):
    """Where a parameter's values lie, such as a file."""

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the row-major parameter, any floating dtype, on the CPU."""


@dataclass
class Recording:
    """What one `deferred_init` context saw. `seed` defines every random value in it, up to a torch.manual_seed inside
    that takes its place from there on; not if it is `fixed`.
    """

    seed: int
    fixed: bool = False
    nodes: list[_Node] = field(default_factory=list, repr=False)
    _alive: dict[int, Any] = field(default_factory=dict, repr=False)  # storages kept, so that addresses stay theirs
    _by_storage: dict[int, list[_Node]] = field(default_factory=dict, repr=False)
    _sources: dict[int, Source] = field(default_factory=dict, repr=False)
    _homes: dict[int, _Home] = field(default_factory=dict, repr=False)  # id(parameter) -> where its values are made
    _entered: int = 0  # what torch's generator was seeded with as the context was entered

    def __deepcopy__(self, memo: object) -> Recording:
        return self

    def attach(self, tensor: Tensor, source: Source) -> None:
        """Let the values of a recorded parameter come from `source` instead of from its own initialisation."""
        self._sources[self._made_at(tensor).storage] = source

    def source(self, tensor: Tensor) -> Source | None:
        return self._sources.get(self._made_at(tensor).storage)

    def initialises(self, tensor: Tensor) -> bool:
        """False where the recording shows that nothing ever wrote this tensor."""
        nodes = self._by_storage.get(self._made_at(tensor).storage, ())
        return any(not node.uninitialised for node in nodes)

    def knows(self, tensor: Tensor) -> bool:
        return self._made_at(tensor).storage in self._alive

    def changed_since(self, tensor: Tensor) -> bool:
        """Whether a parameter was written after the context was left, which nothing recorded."""
        home = self._homes.get(id(tensor))
        return home is not None and home.parameter is tensor and tensor._version != home.version

    def own(self, parameter: nn.Parameter) -> None:
        """Know the parameter again when it is cast outside the context, which gives it another storage."""
        self._homes[id(parameter)] = _Home(parameter, self.hold(parameter), parameter._version)

    def enter(self) -> None:
        """The context is entered: what is drawn from torch's generator inside depends on the seed."""
        self._entered = mix(self.seed, -1 - len(self.nodes))
        torch.default_generator.manual_seed(self._entered)

    def seeds(self) -> set[int]:
        """Those that the values depend on."""
        return {node.seed for node in self.nodes}

    def _seed_now(self) -> int:
        now = torch.default_generator.initial_seed()
        return self.seed if self.fixed or now == self._entered else now

    def leave(self) -> None:
        """The context is left: remember the parameters as they are now."""
        for home in list(self._homes.values()):
            if home.parameter.untyped_storage()._cdata in self._alive:
                self.own(home.parameter)

    def _made_at(self, tensor: Tensor) -> _View:
        view, home = _view(tensor), self._homes.get(id(tensor))
        if view.storage in self._alive or home is None or home.parameter is not tensor or home.view.size != view.size:
            return view
        return home.view

    def replay(self, tensor: Tensor) -> Tensor:
        """The value of a recorded meta tensor, on the CPU; elements that nothing initialised are NaN.

        torch's generator is left as it was. Memory: the tensor, and what its own initialisation needs.
        """
        wanted = self._made_at(tensor)
        nodes = self._slice(wanted.storage)
        memory: dict[int, torch.UntypedStorage] = {}
        last_use = {s: n.index for n in nodes for s in (*n.reads, *n.writes)}
        last_use[wanted.storage] = len(self.nodes)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for node in nodes:
                self._run(node, memory)
                for storage in [s for s in memory if last_use[s] <= node.index]:
                    del memory[storage]
            return _tensor(wanted, memory).to(tensor.dtype)

    def _slice(self, storage: int) -> list[_Node]:
        """The operations that the storage's final value depends on, in order."""
        chosen: dict[int, _Node] = {}
        pending = [(storage, len(self.nodes))]
        while pending:
            target, before = pending.pop()
            for node in self._by_storage.get(target, ()):
                if node.index >= before or node.index in chosen:
                    continue
                chosen[node.index] = node
                pending += [(s, node.index) for s in (*node.reads, *node.writes) if s != target]
        return [chosen[i] for i in sorted(chosen)]

    def _run(self, node: _Node, memory: dict[int, torch.UntypedStorage]) -> None:
        def restore(value: Any) -> Any:
            if isinstance(value, _View):
                return _tensor(value, memory)
            if isinstance(value, _Real):
                if value.tensor._version != value.version:
                    raise DeferredInitError(
                        f"{node.function} in deferred_init() read a tensor of shape {tuple(value.tensor.shape)} "
                        "that was changed afterwards; give it a copy, or build this part of the model outside"
                    )
                return value.tensor.cpu()
            if isinstance(value, torch.device):
                return torch.device("cpu")
            return None if isinstance(value, torch.Generator) else value

        torch.default_generator.manual_seed(mix(node.seed, node.index))
        args, kwargs = tree_map(restore, (node.args, node.kwargs))
        results = node.function(*args, **kwargs)
        for view, result in zip(node.outputs, tree_flatten(results)[0], strict=True):
            if view is None or view.storage in memory:
                continue
            if tuple(result.stride()) != view.stride or result.storage_offset() != view.offset:
                result = torch.empty_strided(view.size, view.stride, dtype=view.dtype).copy_(result)
            if node.uninitialised:
                result.fill_(math.nan if result.dtype.is_floating_point else 0)
            memory[view.storage] = result.untyped_storage()

    def add(self, function: Any, args: Any, kwargs: Any, results: Any, written: list[Tensor]) -> None:
        """Note one operation, whose `results` and `written` arguments may be meta tensors."""
        reads: list[int] = []

        def encode(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if not on_meta(value):
                return _Real(value, value._version)
            view = self.hold(value)
            reads.append(view.storage)
            return view

        encoded, named = tree_map(encode, args), tree_map(encode, kwargs)
        leaves = tree_flatten(results)[0]
        outputs = tuple(self.hold(r) if isinstance(r, Tensor) and on_meta(r) else None for r in leaves)
        created = [v.storage for v in outputs if v is not None and v.storage not in self._by_storage]
        changed = [_view(t).storage for t in written if on_meta(t)]
        writes = tuple(dict.fromkeys(created + changed))
        uninitialised = function._schema.name in UNINITIALISED
        links = (tuple(reads), writes, outputs)
        node = _Node(len(self.nodes), function, encoded, named, *links, self._seed_now(), uninitialised)
        self.nodes.append(node)
        for storage in writes:
            self._by_storage.setdefault(storage, []).append(node)

    def hold(self, tensor: Tensor) -> _View:
        view = _view(tensor)
        self._alive.setdefault(view.storage, tensor.untyped_storage())
        return view


def on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # is_meta is what _PretendReal changes


def _view(tensor: Tensor) -> _View:
    place = tensor.untyped_storage()._cdata
    return _View(place, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)


def _tensor(view: _View, memory: dict[int, torch.UntypedStorage]) -> Tensor:
    if view.storage not in memory:
        raise DeferredInitError("a value was built from a meta tensor made outside deferred_init(); make it inside")
    return torch.empty(0, dtype=view.dtype).set_(memory[view.storage], view.offset, view.size, view.stride)


def mix(seed: int, index: int) -> int:
    """A 63-bit seed of its own for each operation."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "little") >> 1

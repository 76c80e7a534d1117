"""Runs recorded operations again: the value of one recorded storage, alone, with as little memory as it takes.

Owns the form of an operation and how it runs. Not here: how operations are noticed (in deferred_init.py), which tensor
is in which storage (in init_recording.py).

[Note: slices of a weight]
Where several operations read one storage, as the tiles of a `TiledLinear` read the weight that they are cut from, the
value is made once for all of them. It is made element by element if possible: operations that fill a storage from a
random generator and then work on each element alone need only the requested elements and the generators' states:

    A = empty, A.normal_()             node 7, 8: nobody asks for A itself
    tile 0 = empty, tile 0.copy_(A[0:4])     node 12: elements [0, 4·k) of A are drawn, used and freed
    tile 1 = empty, tile 1.copy_(A[4:8])     node 16: the generator of node 8 goes on with elements [4·k, 8·k)

Everything else (`orthogonal_`, writes to a part) makes the whole storage, which is kept until its last reader has run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import DeferredInitError

UNINITIALISED = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided")
_DRAWS = ("aten::uniform_", "aten::normal_")
_OVERWRITES = (*_DRAWS, "aten::zero_", "aten::fill_", "aten::copy_", "zero::source")  # nothing before them counts
_ELEMENTWISE = (
    *(*_DRAWS, "aten::zero_", "aten::fill_", "aten::add_", "aten::sub_", "aten::mul_", "aten::div_"),
    *("aten::clamp_", "aten::erfinv_"),
)
_BLOCK = 16  # elements that torch draws together on a CPU; the last such block may overlap the one before it
_SKIPPED = 1 << 20  # elements drawn at a time to skip unrequested ones
_KEPT = 4  # shared values at once; one that is never read again is dropped when others come


@dataclass(frozen=True)
class View:
    """A tensor's place in a recorded storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    whole: bool  # it is the storage, row by row

    @property
    def span(self) -> tuple[int, int]:
        """Returns the elements [start, stop) of the storage, from the first to the last of this tensor."""
        if 0 in self.size:
            return self.offset, self.offset
        return self.offset, self.offset + 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    def of(self, elements: Tensor, start: int = 0) -> Tensor:
        """Returns this view of `elements`, the storage's from `start` on."""
        return elements.as_strided(self.size, self.stride, elements.storage_offset() + self.offset - start)

    def of_memory(self, memory: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(memory, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class Real:
    """An argument with memory of its own, kept by reference."""

    tensor: Tensor
    version: int


class Source(Protocol):
    """The origin of a parameter's values, such as a file."""

    def read(self, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) of the row-major parameter, any floating dtype, on the CPU."""


@dataclass
class Node:
    """One recorded operation. Arguments hold View and Real where tensors were."""

    index: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: tuple[int, ...]  # storages
    writes: tuple[int, ...]  # storages created or changed
    outputs: tuple[View | None, ...]  # of the flattened results
    seed: int  # the user's
    draws: int  # seeds the generator, of this operation alone

    @property
    def name(self) -> str:
        return self.function._schema.name  # type: ignore[attr-defined]

    @property
    def uninitialised(self) -> bool:
        return self.name in UNINITIALISED

    def overwrites(self, storage: int) -> bool:
        """Whether every element gets a value that does not depend on the earlier one."""
        return self._covers(storage) and self.name in _OVERWRITES

    def goes_by_element(self, storage: int) -> bool:
        """Whether each element's value depends on nothing but that element and the generator."""
        return self._covers(storage) and self.name in _ELEMENTWISE and not _tensors((self.args[1:], self.kwargs))

    def _covers(self, storage: int) -> bool:
        into = self.args[0] if self.args else None
        if not isinstance(into, View) or into.storage != storage or not into.whole or self.writes != (storage,):
            return False
        return all(not isinstance(t, View) or t.storage != storage for t in _tensors((self.args[1:], self.kwargs)))

    def run(self, into: Tensor) -> None:
        """Runs it on part of the storage, for an operation that goes element by element."""
        self.function(into, *tree_map(_plain, self.args[1:]), **tree_map(_plain, self.kwargs))


class Replay:
    """The operations of a recording, and the values that they produce."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.writers: dict[int, list[Node]] = {}  # by storage
        self._readers: dict[int, list[int]] = {}  # by storage: operations that read it and do not write it
        # By storage and the number of its writers before: operations that have not read the value yet, and its reader.
        self._shared: dict[tuple[int, int], tuple[set[int], Callable[[View], Tensor]]] = {}

    def add(self, *operation: Any, **more: Any) -> None:
        """Adds an operation: the fields of a Node without its index."""
        node = Node(len(self.nodes), *operation, **more)
        self.nodes.append(node)
        for storage in node.writes:
            self.writers.setdefault(storage, []).append(node)
        for storage in dict.fromkeys(node.reads):
            if storage not in node.writes:
                self._readers.setdefault(storage, []).append(node.index)

    def value(self, view: View) -> Tensor:
        """Returns the value after all operations; elements that nothing initialised are NaN. torch's generator stays as
        it was."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return view.of_memory(self._memory(view.storage, len(self.nodes)))

    def elements(self, view: View) -> Callable[[int, int], Tensor] | None:
        """Returns a function that makes elements [start, stop) of a storage's value, in ascending order, without making
        the whole. None where that is impossible. See [Note: slices of a weight]. torch's generator stays as it was."""
        with torch.random.fork_rng(devices=[]):
            read = _in_parts(self.writers.get(view.storage, ()), view) if view.whole else None
        if read is None:
            return None

        def made(start: int, stop: int) -> Tensor:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                return read(View(view.storage, (stop - start,), (1,), start, view.dtype, False))

        return made

    def _memory(self, storage: int, before: int) -> torch.UntypedStorage:
        """Returns the storage as operation `before` finds it. Needs memory for it and for its own operations."""
        nodes = self._needed(storage, before)
        memory: dict[int, torch.UntypedStorage] = {}
        last_use = {s: n.index for n in nodes for s in (*n.reads, *n.writes)}
        last_use[storage] = before
        for i, node in enumerate(nodes):
            self._run(node, memory, nodes[i + 1 :])
            for done in [s for s in memory if last_use[s] <= node.index]:
                del memory[done]
        return _known(memory, storage)

    def _needed(self, storage: int, before: int) -> list[Node]:
        """Returns the operations that the storage's value depends on, in order, without those of shared values."""
        chosen: dict[int, Node] = {}
        pending = [(storage, before)]
        while pending:
            target, before = pending.pop()
            writers = [node for node in self.writers.get(target, ()) if node.index < before]
            first = max((i for i, node in enumerate(writers) if node.overwrites(target)), default=0)
            for node in {n.index: n for n in (*writers[:1], *writers[first:])}.values():  # the first one makes it
                if node.index not in chosen:
                    chosen[node.index] = node
                    others = (s for s in (*node.reads, *node.writes) if s != target and not self._shares(node, s))
                    pending += [(s, node.index) for s in others]
        return [chosen[i] for i in sorted(chosen)]

    def _run(self, node: Node, memory: dict[int, torch.UntypedStorage], following: Sequence[Node]) -> None:
        def restore(value: Any) -> Any:
            if isinstance(value, View):
                if self._shares(node, value.storage):
                    return self._share(node, value)
                return value.of_memory(_known(memory, value.storage))
            if isinstance(value, Real):
                if value.tensor._version != value.version:
                    raise DeferredInitError(
                        f"{node.function} in deferred_init() read a tensor of shape {tuple(value.tensor.shape)} "
                        "that was changed before shard() could read it again: use a clone() made before the block"
                    )
                return value.tensor.cpu()
            return _plain(value)

        args, kwargs = tree_map(restore, (node.args, node.kwargs))
        torch.default_generator.manual_seed(node.draws)
        results = node.function(*args, **kwargs)
        for view, result in zip(node.outputs, tree_flatten(results)[0], strict=True):
            if view is None or view.storage in memory:
                continue
            if view.whole and result.is_contiguous():
                result = result.view(view.size)  # a factory may have made it in another shape than the parameter's
            if tuple(result.stride()) != view.stride or result.storage_offset() != view.offset:
                result = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="cpu").copy_(result)
            user = next((n for n in following if view.storage in (*n.reads, *n.writes)), None)
            if node.uninitialised and not (user is not None and user.overwrites(view.storage)):
                result.fill_(math.nan if result.dtype.is_floating_point else 0)
            memory[view.storage] = result.untyped_storage()

    def _shares(self, node: Node, storage: int) -> bool:
        """Whether this operation reads a storage that others read too."""
        return storage not in node.writes and len(self._readers.get(storage, ())) > 1

    def _share(self, node: Node, view: View) -> Tensor:
        """Returns the view that the operation reads, of a value that is made once for all operations that read it."""
        writers = [n for n in self.writers.get(view.storage, ()) if n.index < node.index]
        key = view.storage, len(writers)
        readers, read = self._shared.pop(key) if key in self._shared else self._make(writers, node, view)
        result = read(view)
        readers.discard(node.index)
        if readers:
            self._shared[key] = readers, read
            while len(self._shared) > _KEPT:
                del self._shared[next(iter(self._shared))]
        return result

    def _make(self, writers: list[Node], node: Node, view: View) -> tuple[set[int], Callable[[View], Tensor]]:
        """Makes the value for all operations that read the storage after `writers` and before its next writer."""
        since = writers[-1].index if writers else -1
        until = min((n.index for n in self.writers.get(view.storage, ()) if n.index > since), default=len(self.nodes))
        readers = {i for i in self._readers[view.storage] if since < i < until}
        if (read := _in_parts(writers, view)) is None:
            read = functools.partial(View.of_memory, memory=self._memory(view.storage, node.index))
        return readers, read


def _from_source(source: Source, view: View) -> Tensor:
    start, stop = view.span
    return view.of(source.read(start, stop).to(view.dtype), start)


class _Stream:
    """Draws elements of a storage in ascending order, as they are requested: see [Note: slices of a weight]."""

    def __init__(self, nodes: Sequence[Node], whole: View) -> None:
        self._nodes, self._dtype = nodes, whole.dtype
        self._numel = math.prod(whole.size)
        self._begin()

    def _begin(self) -> None:
        self._block = torch.empty(0, dtype=self._dtype, device="cpu")  # elements up to `_stop`
        self._stop = 0
        self._generators = []
        for node in self._nodes:
            torch.default_generator.manual_seed(node.draws)
            self._generators.append(torch.default_generator.get_state())

    def read(self, view: View) -> Tensor:
        start, stop = view.span
        last = max(0, self._numel // _BLOCK - 1) * _BLOCK  # where the last draw begins, with the block that overlaps
        first = min(start // _BLOCK * _BLOCK, last)
        end = -(-stop // _BLOCK) * _BLOCK if stop <= last else self._numel
        if first < self._stop - self._block.numel():
            self._begin()
        while self._stop < first:
            self._draw(torch.empty(min(_SKIPPED, first - self._stop), dtype=self._dtype, device="cpu"))
            self._block = torch.empty(0, dtype=self._dtype, device="cpu")
        kept = self._block[first - self._stop + self._block.numel() :]
        if end > self._stop:
            block = torch.empty(end - first, dtype=self._dtype, device="cpu")
            block[: kept.numel()].copy_(kept)
            self._draw(block[kept.numel() :])
            kept = block
        self._block = kept
        return view.of(kept, first)

    def _draw(self, into: Tensor) -> None:
        """Draws the next elements."""
        for i, node in enumerate(self._nodes):
            torch.default_generator.set_state(self._generators[i])
            node.run(into)
            self._generators[i] = torch.default_generator.get_state()
        self._stop += into.numel()


def _in_parts(writers: Sequence[Node], view: View) -> Callable[[View], Tensor] | None:
    """Returns a function that reads views of the value that a storage's operations produce; None if it cannot be made
    in parts."""
    storage = view.storage
    if (first := max((i for i, node in enumerate(writers) if node.overwrites(storage)), default=None)) is None:
        return None
    nodes, whole = writers[first:], writers[first].args[0]
    if nodes[0].name == "zero::source" and len(nodes) == 1:
        return functools.partial(_from_source, nodes[0].kwargs["source"])
    dtypes = {view.dtype, *(node.args[0].dtype for node in nodes if node.goes_by_element(storage))}
    if len(dtypes) > 1 or not all(node.goes_by_element(storage) for node in nodes):
        return None
    if not all(_draws_in_parts(node.function, view.dtype) for node in nodes if node.name in _DRAWS):
        return None
    return _Stream(nodes, whole).read


@functools.cache
def _draws_in_parts(function: Callable[..., Any], dtype: torch.dtype) -> bool:
    """Whether this torch draws the same numbers in two calls, the first of whole blocks, as in one."""
    drawn = []
    for cuts in ((7 * _BLOCK + 3,), (4 * _BLOCK, 3 * _BLOCK + 3)):
        torch.default_generator.manual_seed(0)
        drawn.append(torch.cat([function(torch.empty(numel, dtype=dtype, device="cpu")) for numel in cuts]))
    return torch.equal(*drawn)


def _tensors(arguments: Any) -> list[View | Real]:
    return [value for value in tree_flatten(arguments)[0] if isinstance(value, (View, Real))]


def _plain(value: Any) -> Any:
    """Returns an argument that is not a tensor, for a run on the CPU with torch's own generator."""
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _known(memory: dict[int, torch.UntypedStorage], storage: int) -> torch.UntypedStorage:
    if storage not in memory:
        raise DeferredInitError("a value was built from a meta tensor made outside deferred_init(); make it inside")
    return memory[storage]

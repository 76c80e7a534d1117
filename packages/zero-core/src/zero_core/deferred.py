"""Building a model without its memory: `deferred_init` records what construction does to parameters.

Owns the recording and its replay. Which parameters are wanted when, and where their values go, is `init`'s.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from .errors import DeferredInitError

__all__ = ["Recording", "Source", "continue_recording", "deferred_init", "forget_recording", "recording_of"]

_ATTRIBUTE = "_zero_core_recording"  # on modules that own a deferred parameter
_UNINITIALISED = (
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::new_empty_strided",
)
_FACTORIES = (
    *_UNINITIALISED,
    *("aten::zeros", "aten::ones", "aten::full", "aten::rand", "aten::randn", "aten::zeros_like", "aten::ones_like"),
    *("aten::full_like", "aten::rand_like", "aten::randn_like", "aten::new_zeros", "aten::new_ones", "aten::new_full"),
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
    uninitialised: bool = False


class Source(Protocol):
    """Where a parameter's values lie, such as a file."""

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the row-major parameter, any floating dtype, on the CPU."""


@dataclass
class Recording:
    """What one `deferred_init` context saw. `seed` defines every random value in it."""

    seed: int
    nodes: list[_Node] = field(default_factory=list, repr=False)
    _alive: dict[int, Any] = field(default_factory=dict, repr=False)  # storages kept, so that addresses stay theirs
    _by_storage: dict[int, list[_Node]] = field(default_factory=dict, repr=False)
    _sources: dict[int, Source] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: object) -> Recording:
        return self

    def attach(self, tensor: Tensor, source: Source) -> None:
        """Let the values of a recorded parameter come from `source` instead of from its own initialisation."""
        self._sources[self.hold(tensor).storage] = source

    def source(self, tensor: Tensor) -> Source | None:
        return self._sources.get(tensor.untyped_storage()._cdata)

    def initialises(self, tensor: Tensor) -> bool:
        """False where the recording shows that nothing ever wrote this tensor."""
        nodes = self._by_storage.get(tensor.untyped_storage()._cdata, ())
        return any(not node.uninitialised for node in nodes)

    def knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._alive

    def replay(self, tensor: Tensor) -> Tensor:
        """The value of a recorded meta tensor, on the CPU; elements that nothing initialised are NaN.

        torch's generator is left as it was. Memory: the tensor, and what its own initialisation needs.
        """
        wanted = _view(tensor)
        nodes = self._slice(wanted.storage)
        memory: dict[int, torch.UntypedStorage] = {}
        last_use = {s: n.index for n in nodes for s in (*n.reads, *n.writes)}
        last_use[wanted.storage] = len(self.nodes)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for node in nodes:
                self._run(node, memory)
                for storage in [s for s in memory if last_use[s] <= node.index]:
                    del memory[storage]
            return _tensor(wanted, memory)

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

        torch.default_generator.manual_seed(_mix(self.seed, node.index))
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
            if not _on_meta(value):
                return _Real(value.detach(), value._version)
            view = self.hold(value)
            reads.append(view.storage)
            return view

        encoded, named = tree_map(encode, args), tree_map(encode, kwargs)
        leaves = tree_flatten(results)[0]
        outputs = tuple(self.hold(r) if isinstance(r, Tensor) and _on_meta(r) else None for r in leaves)
        created = [v.storage for v in outputs if v is not None and v.storage not in self._by_storage]
        changed = [_view(t).storage for t in written if _on_meta(t)]
        writes = tuple(dict.fromkeys(created + changed))
        uninitialised = function._schema.name in _UNINITIALISED
        node = _Node(len(self.nodes), function, encoded, named, tuple(reads), writes, outputs, uninitialised)
        self.nodes.append(node)
        for storage in writes:
            self._by_storage.setdefault(storage, []).append(node)

    def hold(self, tensor: Tensor) -> _View:
        view = _view(tensor)
        self._alive.setdefault(view.storage, tensor.untyped_storage())
        return view


@contextmanager
def deferred_init(seed: int | None = None) -> Iterator[Recording]:
    """Build modules inside: parameters take no memory until `shard` (or `init.materialise`) makes their values.

    seed: of every random value; by default torch's own, as `torch.manual_seed` left it, and then the same on every rank
    only if the user seeded them so (`shard` checks). The same seed and code give the same weights at every world size,
    stage and store. Random numbers drawn inside leave torch's generator as it was.
    """
    recording = Recording(torch.initial_seed() if seed is None else seed)
    with _recording_into(recording):
        yield recording


@contextmanager
def continue_recording(module: nn.Module) -> Iterator[None]:
    """Build more modules in the recording that made `module`'s own parameters."""
    recording = recording_of(module)
    if recording is None:
        raise DeferredInitError(f"{type(module).__name__} is on meta and was not built in deferred_init()")
    with _recording_into(recording):
        yield


@contextmanager
def _recording_into(recording: Recording) -> Iterator[None]:
    mode = _Recorder(recording)

    def defer(module: nn.Module, name: str, parameter: nn.Parameter) -> Any:
        if type(parameter) is not nn.Parameter:
            return None  # a subclass that knows how it wants to be made
        if not _on_meta(parameter):
            parameter = mode.put_on_meta(parameter)
        module.__dict__[_ATTRIBUTE] = recording
        return parameter

    def make_real(module: nn.Module, name: str, buffer: Tensor | None) -> Any:
        if buffer is None or not _on_meta(buffer) or not recording.knows(buffer):
            return None
        with mode.paused():
            return recording.replay(buffer)

    hooks = [register_module_parameter_registration_hook(defer), register_module_buffer_registration_hook(make_real)]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_mix(recording.seed, -1 - len(recording.nodes)))
            with _PretendReal(recording), mode:
                yield
    finally:
        for hook in hooks:
            hook.remove()


def recording_of(module: nn.Module) -> Recording | None:
    """The recording that made this module's own parameters, if any."""
    return module.__dict__.get(_ATTRIBUTE)


def forget_recording(module: nn.Module) -> None:
    """The module's own parameters have their values now."""
    module.__dict__.pop(_ATTRIBUTE, None)


class _Recorder(TorchDispatchMode):
    """Runs every operation; notes those that create or write meta memory."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self._is_paused = False
        self._fresh: dict[int, tuple[Any, Any, Any]] = {}  # real storages that one factory made and nothing has changed

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return function(*args, **kwargs)
        inputs = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        written = _written(function, args, kwargs)
        if any(_on_meta(t) for t in inputs) and (
            any(not _on_meta(t) for t in written) or function is torch.ops.aten._local_scalar_dense.default
        ):  # meta values flow into real ones: they are wanted now
            args, kwargs = tree_map_only(Tensor, self._value, (args, kwargs))
        results = function(*args, **kwargs)
        outputs = [t for t in tree_flatten(results)[0] if isinstance(t, Tensor)]
        if any(_on_meta(t) for t in written) or any(_on_meta(t) and not self.recording.knows(t) for t in outputs):
            self.recording.add(function, args, kwargs, results, written)
        for tensor in written:
            self._fresh.pop(tensor.untyped_storage()._cdata, None)
        known = {t.untyped_storage()._cdata for t in inputs if not _odd(t)}
        for tensor in outputs:
            if not _on_meta(tensor) and not _odd(tensor) and tensor.untyped_storage()._cdata not in known:
                self._fresh.pop(tensor.untyped_storage()._cdata, None)
                if function._schema.name in _FACTORIES:
                    self._fresh[tensor.untyped_storage()._cdata] = (function, args, kwargs)
        return results

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Our own operations in the registration hooks, which are no part of the recording."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _value(self, tensor: Tensor) -> Tensor:
        if not _on_meta(tensor) or not self.recording.knows(tensor):
            return tensor
        return self.recording.replay(tensor)

    def put_on_meta(self, parameter: nn.Parameter) -> nn.Parameter:
        """A meta parameter in the place of a real one, whose value is recorded as briefly as can be."""
        with self.paused():
            shape, stride = parameter.shape, parameter.stride()
            data = torch.empty_strided(shape, stride, dtype=parameter.dtype, device="meta")
            whole = parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
            maker = self._fresh.get(parameter.untyped_storage()._cdata) if whole and parameter.is_contiguous() else None
            if maker is None:  # computed values: kept as they are, to be copied in
                self.recording.add(_copied, (parameter.detach(),), {}, data, [])
            elif maker[0]._schema.name in _UNINITIALISED:
                kwargs = {"dtype": parameter.dtype}
                self.recording.add(torch.ops.aten.empty.memory_format, (list(shape),), kwargs, data, [])
            else:
                function, args, kwargs = maker
                self.recording.add(_reshaped(function, shape), args, kwargs, data, [])
            meta = nn.Parameter(data, requires_grad=parameter.requires_grad)
        meta.__dict__.update(parameter.__dict__)
        return meta


class _PretendReal(TorchFunctionMode):
    """Lets `is_meta` be false for recorded tensors: initialisers, torch's own among them, skip what is on meta."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == _IS_META and self.recording.knows(args[0]):
            return False
        return function(*args, **(kwargs or {}))


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class _Schema:
    """Stands where an operator's schema is read."""

    def __init__(self, name: str) -> None:
        self.name = name


def _copied(value: Tensor) -> Tensor:
    return value.clone()


_copied._schema = _Schema("zero::copied")  # type: ignore[attr-defined]


def _reshaped(function: Any, shape: torch.Size) -> Callable[..., Tensor]:
    """The factory, its result viewed as the parameter was when it was registered."""

    def make(*args: Any, **kwargs: Any) -> Tensor:
        return function(*args, **kwargs).view(shape)

    make._schema = _Schema(function._schema.name)  # type: ignore[attr-defined]
    return make


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors an operation changes in place."""
    if not function._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for i, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_flatten(value)[0] if isinstance(t, Tensor)]
    return found


def _on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # is_meta is what _PretendReal changes


def _odd(tensor: Tensor) -> bool:
    """Sparse and the like, which have no storage of their own."""
    return tensor.layout is not torch.strided


def _view(tensor: Tensor) -> _View:
    place = tensor.untyped_storage()._cdata
    return _View(place, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)


def _tensor(view: _View, memory: dict[int, torch.UntypedStorage]) -> Tensor:
    if view.storage not in memory:
        raise DeferredInitError("a value was built from a meta tensor made outside deferred_init(); make it inside")
    return torch.empty(0, dtype=view.dtype).set_(memory[view.storage], view.offset, view.size, view.stride)


def _mix(seed: int, index: int) -> int:
    """A 63-bit seed of its own for each operation."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "little") >> 1

"""Records the operations of construction on parameters: which, on which storages, with which seeds.

Owns the way from a parameter to the storage that its value is made in. Not here: how operations are noticed (in
deferred_init.py) and run again (in init_replay.py).

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
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from .init_replay import Real, Replay, Source, View


@dataclass(frozen=True)
class _Home:
    """A parameter, where its values are made, and its version when the context was left."""

    parameter: nn.Parameter
    made: Tensor  # without memory, in the dtype that it was made in
    view: View
    version: int


@dataclass
class Recording:
    """The operations of one `deferred_init` context. `seed` defines every random value in it. A torch.manual_seed
    inside replaces it from there on, unless it is `fixed`.
    """

    seed: int
    fixed: bool = False
    _replay: Replay = field(default_factory=Replay, repr=False)
    _alive: dict[int, Any] = field(default_factory=dict, repr=False)  # storages kept, so no address is reused
    _homes: dict[int, _Home] = field(default_factory=dict, repr=False)  # id(parameter) -> where its values are made
    _changed: set[int] = field(default_factory=set, repr=False)  # id(parameter), of those changed outside the context
    _drawing: int = 0  # operations that may draw, so far: each from a generator of its own
    _entered: int = 0  # the seed of torch's generator when the context was entered

    def __deepcopy__(self, memo: object) -> Recording:
        return self

    def attach(self, tensor: Tensor, source: Source) -> None:
        """Takes the values of a recorded parameter from `source` instead of from its own initialisation."""
        view = self._made_at(tensor)
        self._replay.add(_read, (view,), {"source": source}, (), (view.storage,), (), self.seed, draws=0)

    def source(self, tensor: Tensor) -> Source | None:
        """Returns the attached source of the parameter's values; None if it has none or was written since."""
        view = self._made_at(tensor)
        last = self._replay.writers.get(view.storage, [None])[-1]
        return last.kwargs["source"] if last is not None and last.function is _read and last.args == (view,) else None

    def initialises(self, tensor: Tensor) -> bool:
        """False where the recording shows that nothing ever wrote this tensor."""
        nodes = self._replay.writers.get(self._made_at(tensor).storage, ())
        return any(not node.uninitialised for node in nodes)

    def knows(self, tensor: Tensor) -> bool:
        return self._made_at(tensor).storage in self._alive

    def changed_since(self, tensor: Tensor) -> bool:
        """Whether a parameter was written after the context was left, which nothing recorded."""
        home = self._homes.get(id(tensor))
        return home is not None and home.parameter is tensor and tensor._version != home.version

    def own(self, parameter: nn.Parameter) -> None:
        """Recognises the parameter when it is cast outside the context, which gives it another storage."""
        self._homes[id(parameter)] = _Home(parameter, parameter.detach(), self.hold(parameter), parameter._version)

    def has_parameter_over(self, tensor: Tensor) -> bool:
        """Whether a parameter has its values in the tensor's memory."""
        storage = _view(tensor).storage
        return any(home.view.storage == storage for home in self._homes.values())

    def enter(self) -> None:
        """Enters the context: numbers that are drawn from torch's generator inside depend on the seed."""
        self._changed = {key for key, home in self._homes.items() if self.changed_since(home.parameter)}
        self._entered = mix(self.seed, -1 - self._drawing)
        torch.default_generator.manual_seed(self._entered)

    def seeds(self) -> set[int]:
        """Returns the seeds that the values depend on."""
        return {node.seed for node in self._replay.nodes}

    def leave(self) -> None:
        """Leaves the context: remembers parameters as they are now, except those that were changed before it began."""
        for key, home in list(self._homes.items()):
            if key not in self._changed and home.parameter.untyped_storage()._cdata in self._alive:
                self.own(home.parameter)

    def _made_at(self, tensor: Tensor) -> View:
        view, home = _view(tensor), self._homes.get(id(tensor))
        if view.storage in self._alive or home is None or home.parameter is not tensor or home.view.size != view.size:
            return view
        return home.view

    def made(self, parameter: Tensor) -> Tensor:
        """Returns the parameter for operations inside the context: as it was there, whatever it was cast to outside."""
        return self._homes[id(parameter)].made

    def replay(self, tensor: Tensor) -> Tensor:
        """Returns the value of a recorded meta tensor, on the CPU; elements that nothing initialised are NaN.

        torch's generator is left as it was. Needs memory for the tensor and for its own initialisation.
        """
        return self._replay.value(self._made_at(tensor)).to(tensor.dtype)

    def elements(self, tensor: Tensor) -> Callable[[int, int], Tensor] | None:
        """Returns a function that makes elements [start, stop) of a recorded meta tensor's value, in ascending order,
        without making the whole. None where that is impossible."""
        return self._replay.elements(self._made_at(tensor))

    def add(self, function: Any, args: Any, kwargs: Any, results: Any, written: list[Tensor]) -> None:
        """Records one operation, whose `results` and `written` arguments may be meta tensors."""
        reads: list[int] = []

        def encode(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if not on_meta(value):
                return Real(value, value._version)  # detach() would count apart here
            view = self.hold(value)
            reads.append(view.storage)
            return view

        encoded, named = tree_map(encode, args), tree_map(encode, kwargs)
        leaves = tree_flatten(results)[0]
        outputs = tuple(self.hold(r) if isinstance(r, Tensor) and on_meta(r) else None for r in leaves)
        created = [v.storage for v in outputs if v is not None and v.storage not in self._replay.writers]
        writes = tuple(dict.fromkeys(created + [_view(t).storage for t in written if on_meta(t)]))
        now = torch.default_generator.initial_seed()
        seed = self.seed if self.fixed or now == self._entered else now
        self._replay.add(function, encoded, named, tuple(reads), writes, outputs, seed, mix(seed, self._drawing))
        self._drawing += 1

    def hold(self, tensor: Tensor) -> View:
        view = _view(tensor)
        self._alive.setdefault(view.storage, tensor.untyped_storage())
        return view


def on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # is_meta is what _PretendReal changes


def _view(tensor: Tensor) -> View:
    place = tensor.untyped_storage()._cdata
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    size, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    return View(place, size, stride, offset, tensor.dtype, whole)


def _read(into: Tensor, source: Source) -> None:
    into.copy_(source.read(0, into.numel()).to(into.dtype).view(into.shape))


_read._schema = SimpleNamespace(name="zero::source")  # type: ignore[attr-defined]


def mix(seed: int, index: int) -> int:
    """Returns a 63-bit seed of its own for each operation."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest(), "little") >> 1

"""Replays and restores the buffers and attributes that a unit's forward writes, such as BatchNorm's statistics.

[Note: a forward that writes, run twice]
Recomputation runs a unit's forward a second time. The second run has to find buffers and attributes as the first run
found them, or the gradients do not belong to the loss; and it must not leave its own writes behind, or a running mean
moves twice a step. torch's checkpointing leaves both to the user. Here, buffers that the first run writes are copied
before it begins, and the second run is given copies. Small buffers are copied always. Which larger ones are written is
found out in the unit's first call, in training and in evaluation each; BatchNorm's are always treated as written.
Attributes are kept by reference. Random generators, small arrays of numpy, lists, dicts, deques and sets are copied,
also inside one another.

A unit that computes its batch in parts may not write into a buffer at all. Each part finds the attributes as the first
one did, and the values that it sets in them are joined over the parts, as outputs are.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.utils import _pytree as pytree

from ..core import tensors_of
from .spill import ActivationError, keep
from .split_batch import as_found, is_state, way_out

Place = tuple[int, str, str]  # the module's number, "_buffers" or "_parameters", or "" for an attribute; the name
Found = dict[Place, tuple[Any, int]]  # a value, or a copy of it, and its version
SMALL_BYTES = 64 << 10  # copied at each call
_PARTS = {name for name in nn.Module().__dict__ if name.startswith("_forward")} | {"_modules"}  # hooks, submodules
_OWN = frozenset(nn.Module().__dict__) - {"training"} - _PARTS  # torch's own, which are left alone
_TREES = (list, dict, OrderedDict, deque, defaultdict)
_CONTAINERS = (*_TREES, set, Counter)
_VALUES = (Tensor, bool, int, float, str, type(None))


class Buffers:
    """The buffers and attributes of one unit. A dict `found` has their values before one call."""

    def __init__(self, unit: str, module: nn.Module) -> None:
        self._unit, self._module = unit, module
        self._paths, self._modules = zip(*module.named_modules(), strict=True)
        kind = nn.modules.batchnorm._BatchNorm
        self._written = {place for place in self._values() if isinstance(self._modules[place[0]], kind)}
        self._seen: set[bool] = set()  # module.training of the calls that were watched
        self._parameters = list(module.named_parameters())
        self._rewritten: set[int] = set()  # parameters that a first run wrote

    @contextmanager
    def first_run(self, found: Found) -> Iterator[None]:
        """A context for the first run of the forward. Fills `found`.

        Raises ActivationError for a write into a buffer that was not copied, because no earlier call wrote there.
        """
        new = self._module.training not in self._seen
        before = self._snapshot(everything=new)
        of_parameters = [parameter._version for _, parameter in self._parameters]
        found.update(self._found(before))  # a backward inside of the forward repeats it up to there
        yield
        self._rewritten |= {
            k for k, (_, parameter) in enumerate(self._parameters) if parameter._version != of_parameters[k]
        }
        for place in before.written():
            self._written.add(place)
            if place not in before.copies:
                raise ActivationError(
                    f"unit {self._unit} wrote into its {self._name(place)} in forward, but not in its first call in "
                    f"this mode (train or eval), so the old value was not saved for backward: {keep(self._unit)}"
                )
        self._seen.add(self._module.training)
        found.update(self._found(before))

    @contextmanager
    def second_run(self, found: Found) -> Iterator[None]:
        """A context for the second run of the forward, on the values in `found`. Afterwards restores the present ones.

        Raises ActivationError if a value in `found` was changed since, and for a write that changes a parameter again.
        """
        before = {at: copy.copy(value) if at[2] in _PARTS else value for at, value in self._values().items()}
        parameters = {k: self._parameters[k][1].detach().clone() for k in self._rewritten}
        for place, (value, version) in found.items():
            if _version(value) != version:
                raise ActivationError(
                    f"unit {self._unit} repeats its forward in backward, and its {self._name(place)} was changed "
                    f"between the two: change the {self._name(place)} after backward. Or {keep(self._unit)}"
                )
        values = {k: v for k, (v, _) in found.items()}
        again = values | _copies({k: v for k, v in values.items() if k in self._written or _is_small(v)})
        try:
            self._put(again)
            yield
        finally:
            self._put(before)
            self._refuse_rewritten(parameters)

    def _refuse_rewritten(self, before: Mapping[int, Tensor]) -> None:
        """Raises if recomputation changed a parameter beyond rounding, as an average does and a clamp does not."""
        for k, values in before.items():
            name, parameter = self._parameters[k]
            change = (parameter.detach() - values).double().norm() / values.double().norm().clamp_min(1e-30)
            rounding = 8 * torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
            if not change <= rounding:
                raise ActivationError(
                    f"unit {self._unit} writes into its parameter {name!r} in forward. Backward repeats the forward, "
                    f"which wrote again: make {name!r} a buffer. Or write outside of the unit. Or {keep(self._unit)}"
                )

    @contextmanager
    def part(self, changes: dict[Place, Any], option: str, found: Found | None = None) -> Iterator[None]:
        """A context for the forward of some rows of a batch, or tokens of a row, as `option` says. Undoes its changes
        of attributes, and fills `changes` with them, and `found`.

        found: None: the forward runs only to be compared, and its writes are undone.
        Raises ActivationError if it wrote into a buffer.
        """
        before = self._snapshot(everything=found is None)
        if found is not None:
            found.update(self._found(before))
        try:
            yield
        finally:
            after = self._values()
            written = before.written() | {k for k, v in before.values.items() if k[1] and after.get(k) is not v}
            if found is None:
                before.restore()
            self._put(before.values)
        for place in sorted(written):
            raise ActivationError(
                f"module {self._unit} writes into its {self._name(place)} in forward, and {option}= would repeat the "
                f"write for each part of a {'row' if option == 'tokens' else 'batch'}: {way_out(option, self._unit)}"
            )
        kept = before.values
        changes.update(
            {k: v for k, v in after.items() if isinstance(v, _VALUES) and (k not in kept or kept[k] is not v)}
        )

    def _snapshot(self, *, everything: bool) -> _Snapshot:
        """The present values. everything: with copies of all, not only of those that are small or have been written."""
        values = self._values()
        copies = _copies({k: v for k, v in values.items() if everything or k in self._written or _is_small(v)})
        return _Snapshot(values, copies, {k: _version(v) for k, v in values.items()}, everything)

    def _found(self, before: _Snapshot) -> Found:
        """The values for a second run: copies where a run may write, and the values themselves elsewhere."""
        copied = {k: v for k, v in before.copies.items() if k in self._written or _is_small(v)}
        return {k: (v, _version(v)) for k, v in (before.values | copied).items()}

    def _name(self, place: Place) -> str:
        number, kind, name = place
        return f"{kind[1:-1] or 'attribute'} {'.'.join(filter(None, (self._paths[number], name)))!r}"

    def leave(self, changes: Mapping[Place, Any]) -> None:
        """Sets attributes to the values that the forward of a whole batch would have left."""
        self._put(self._values() | dict(changes))

    def _put(self, values: Mapping[Place, Any]) -> None:
        for number, kind, name in self._values().keys() - values.keys():
            home = self._home(number, kind)
            home[name].clear() if name in _PARTS else home.pop(name)
        for (number, kind, name), value in values.items():
            home = self._home(number, kind)  # a needless write would invalidate compiled code
            if name not in _PARTS and (name not in home or home[name] is not value):
                home[name] = value
            elif name in _PARTS and home[name] != value:  # in place, where the handles of hooks find them
                home[name].clear()
                home[name].update(value)

    def _home(self, number: int, kind: str) -> dict[str, Any]:
        own: dict[str, Any] = self._modules[number].__dict__
        return own[kind] if kind else own

    def _values(self) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        for number, module in enumerate(self._modules):
            found.update({(number, "_buffers", name): buffer for name, buffer in module._buffers.items()})
            found.update({(number, "_parameters", name): value for name, value in module._parameters.items()})
            own = ((name, v) for name, v in module.__dict__.items() if name not in _OWN)
            found.update({(number, "", name): v for name, v in own if name not in _PARTS or v})
        return found


@dataclass(frozen=True)
class _Snapshot:
    """The values before a run, copies of some of them, or of all if `everything` is true, and versions."""

    values: dict[Place, Any]
    copies: dict[Place, Any]
    versions: dict[Place, int]
    everything: bool

    def written(self) -> set[Place]:
        """The places whose tensor was written since, or whose list, dict or set has other tensors with a graph.

        With copies of everything it also finds writes that no version counts, as those of batch_norm's kernels.
        """
        return {place for place, v in self.values.items() if place[2] not in _PARTS and self._was_written(place, v)}

    def _was_written(self, place: Place, value: Any) -> bool:
        if _is_tensor(value):
            counted = _version(value) != self.versions[place]
            return counted or (self.everything and _differ(value, self.copies[place]))
        return type(value) in _CONTAINERS and _with_graph(value) != _with_graph(self.copies[place])

    def restore(self) -> None:
        """Puts the copied values back into the tensors, generators, lists, dicts and sets that were written."""
        for place, kept in self.copies.items():
            value = self.values[place]
            if isinstance(value, torch.Generator):
                value.set_state(kept.get_state())
            elif type(value) in _CONTAINERS:
                value.clear()
                (value.extend if hasattr(value, "extend") else value.update)(kept)
            elif _is_tensor(value) and _differ(value, kept):
                value.detach().copy_(kept)


def _is_tensor(value: Any) -> bool:
    """Whether it is a tensor, and no parameter: shards keep those. torch.func.functional_call puts tensors there."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _is_small(value: Any) -> bool:
    if _is_tensor(value):
        return value.layout is torch.strided and value.nbytes <= SMALL_BYTES
    return type(value) in _CONTAINERS or (is_state(value) and getattr(value, "nbytes", 0) <= SMALL_BYTES)


def _copies(values: Mapping[Place, Any]) -> dict[Place, Any]:
    """Copies of these values, one for each object: where two places have the same one, so they do in the copies."""
    made = {id(v): copy.copy(v) if place[2] in _PARTS else _copied(v) for place, v in values.items()}
    return {place: made[id(value)] for place, value in values.items()}


def _copied(value: Any) -> Any:
    if _is_tensor(value):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in _TREES:  # their items too, except tensors of a graph, which no forward changes
        return pytree.tree_map(lambda v: v if not _is_small(v) or _with_graph(v) else _copied(v), value)
    return copy.copy(value) if type(value) in _CONTAINERS else as_found(value) if is_state(value) else value


def _with_graph(value: Any) -> list[int]:
    return [id(tensor) for tensor in tensors_of(value) if tensor.requires_grad]


def _differ(left: Tensor, right: Tensor) -> bool:
    """Whether values differ. Versions do not tell that, because batch_norm's kernels do not count their writes."""
    try:
        return left.shape != right.shape or not torch.equal(left.detach(), right.detach())
    except (RuntimeError, NotImplementedError):  # layouts that torch cannot compare, such as sparse ones
        return False


def _version(value: Any) -> int:
    return value._version if _is_tensor(value) and not value.is_inference() else 0


# -- random numbers of Python and numpy; torch's checkpointing replays torch's own -------------------------------------


def random_states() -> tuple[Any, Any, Any]:
    """The states of Python's random numbers, and of numpy's if it is imported, and torch's function modes."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state(), overrides._get_current_function_mode_stack()


@contextmanager
def drawn_again(states: tuple[Any, Any, Any]) -> Iterator[None]:
    """A context in which the numbers after `states` are drawn again, under its function modes, such as a default
    device, which autograd leaves. Restores the global states afterwards."""
    now = random_states()
    modes = [mode for mode in states[2] if mode not in now[2]]
    for mode in modes:
        overrides._push_mode(mode)
    try:
        _set(states)
        yield
    finally:
        _set(now)
        for _ in modes:
            overrides._pop_mode()


def _set(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])

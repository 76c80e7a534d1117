"""What a unit's forward writes into its module: buffers, such as running statistics of BatchNorm, and attributes.

[Note: a forward that writes, run twice]
Recomputation runs a unit's forward a second time. The second run has to find buffers and attributes as the first run
found them, or the gradients do not belong to the loss; and it must not leave its own writes behind, or a running mean
moves twice a step. torch's checkpointing leaves both to the user. Here, what the first run writes into is
copied before it begins, and the second run is given copies. Small buffers are copied always. Which larger ones are
written is found out in the unit's first call, in training and in evaluation each; BatchNorm's are always treated as
written. Attributes are kept by reference, and of a list, dict or set one level of what is in it.

A unit that computes its batch in parts may not write into a buffer at all. Each part finds the attributes as the first
one did, and what it leaves in them is joined over the parts, as outputs are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_core.runtime.outputs import tensors_of

from .cutting import way_out
from .spill import ActivationError

__all__ = ["Buffers", "Found"]

Place = tuple[int, bool, str]  # the module's number, whether it is a buffer, its name
Found = dict[Place, tuple[Any, int]]  # a value, or a copy of it, and its version
SMALL_BYTES = 64 << 10  # copied at each call
_OWN = frozenset(nn.Module().__dict__) - {"training"} | {"forward"}  # torch's own, which are left alone
_CONTAINERS = (list, dict, set)


class Buffers:
    """The buffers and attributes of one unit. A dict `found` has what one call found in them."""

    def __init__(self, unit: str, module: nn.Module) -> None:
        self._unit, self._module = unit, module
        self._paths, self._modules = zip(*module.named_modules(), strict=True)
        self._written = {
            place for place in self._values() if isinstance(self._modules[place[0]], nn.modules.batchnorm._BatchNorm)
        }
        self._seen: set[bool] = set()  # module.training of the calls that were watched
        self._parameters = list(module.named_parameters())
        self._rewritten: set[int] = set()  # parameters that a first run wrote

    @contextmanager
    def first_run(self, found: Found) -> Iterator[None]:
        """The forward runs inside of this, for the first time. Fills `found`.

        Raises ActivationError for a write into a buffer that was not copied, because no earlier call wrote there.
        """
        new = self._module.training not in self._seen
        before = self._values()
        kept: dict[Place, Any] = {
            place: _copied(v) for place, v in before.items() if new or place in self._written or _is_small(v)
        }
        versions = {place: _version(v) for place, v in before.items()}
        of_parameters = [parameter._version for _, parameter in self._parameters]
        yield
        for k, (_, parameter) in enumerate(self._parameters):
            if parameter._version != of_parameters[k]:
                self._rewritten.add(k)
        after = self._values()
        for place, value in before.items():
            if not isinstance(value, Tensor):
                continue
            replaced = after.get(place) is not value
            if replaced:
                self._written.add(place)
            elif versions[place] != _version(value) or (new and _differ(kept[place], value)):
                self._written.add(place)
                if place not in kept:
                    raise ActivationError(
                        f"unit {self._unit} wrote into its {self._name(place)} in forward, and not in its first call "
                        "in this mode, so no copy was kept to compute again from: give it the policy 'keep'"
                    )
        self._seen.add(self._module.training)
        for place, value in before.items():
            copied = place in kept and (place in self._written or _is_small(value))
            found[place] = (kept[place], _version(kept[place])) if copied else (value, versions[place])

    @contextmanager
    def second_run(self, found: Found) -> Iterator[None]:
        """The forward runs inside of this again, on what the first run found, and buffers and attributes are as before
        afterwards.

        Raises ActivationError for what was changed since, and for a write into a parameter that changes it again.
        """
        before = self._values()
        parameters = {k: self._parameters[k][1].detach().clone() for k in self._rewritten}
        for place, (value, version) in found.items():
            if _version(value) != version:
                raise ActivationError(
                    f"the {self._name(place)} of unit {self._unit} was written after the unit's forward, which "
                    "backward has to compute again: write it after backward, or give the unit the policy 'keep'"
                )
        again = {k: _copied(v) if k in self._written or _is_small(v) else v for k, (v, _) in found.items()}
        try:
            self._put(again)
            yield
        finally:
            self._put(before)
            self._refuse_rewritten(parameters)

    def _refuse_rewritten(self, before: Mapping[int, Tensor]) -> None:
        """Raise if recomputation changed a parameter beyond rounding, as an average does and a clamp does not."""
        for k, values in before.items():
            name, parameter = self._parameters[k]
            change = (parameter.detach() - values).double().norm() / values.double().norm().clamp_min(1e-30)
            rounding = 8 * torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0
            if not change <= rounding:
                raise ActivationError(
                    f"unit {self._unit} writes into its parameter {name} in forward, and recomputation changed it "
                    "again: make it a buffer, write outside of the unit, or give the unit the policy 'keep'"
                )

    @contextmanager
    def part(self, changes: dict[Place, Any], option: str, found: Found | None = None) -> Iterator[None]:
        """The forward runs inside of this on some rows of a batch, or tokens of a row, as `option` says, and leaves no
        trace. Fills `changes` with the attributes that it changed, and `found`.

        found: None: the forward runs only to be compared, and all values of buffers are compared too.
        Raises ActivationError if it wrote into a buffer.
        """
        whole, before = "row" if option == "tokens" else "batch", self._values()
        kept = {
            place: _copied(v)
            for place, v in before.items()
            if found is None or (_is_small(v) and not (isinstance(v, Tensor) and v.device.type != "cpu"))
        }
        versions = {place: _version(v) for place, v in before.items()}
        if found is not None:
            found.update({place: (kept.get(place, v), _version(kept.get(place, v))) for place, v in before.items()})
        try:
            yield
        finally:
            after = self._values()
            moved = {k for k, v in before.items() if isinstance(v, Tensor) and versions[k] != _version(v)}
            differ = {k for k, v in kept.items() if _changed(before[k], v, compared=found is None)}
            written = [
                place
                for place, value in before.items()
                if place in moved | differ or (place[1] and after.get(place) is not value)
            ]
            self._put(before)
        for place in written:
            raise ActivationError(
                f"unit {self._unit} writes into its {self._name(place)} in forward; with {option}= this would happen "
                f"once per part of a {whole}: {way_out(option)}"
            )
        changes.update({k: v for k, v in after.items() if _is_value(v) and (k not in before or before[k] is not v)})

    def _name(self, place: Place) -> str:
        number, buffer, name = place
        return f"{'buffer' if buffer else 'attribute'} {'.'.join(filter(None, (self._paths[number], name)))}"

    def leave(self, changes: Mapping[Place, Any]) -> None:
        """Sets attributes as the forward of a whole batch would have done."""
        self._put(self._values() | dict(changes))

    def _put(self, values: Mapping[Place, Any]) -> None:
        for number, buffer, name in self._values().keys() - values.keys():
            del self._home(number, buffer)[name]
        for (number, buffer, name), value in values.items():
            home = self._home(number, buffer)
            if name not in home or home[name] is not value:  # else nothing is written, so that compiled code stays
                home[name] = value

    def _home(self, number: int, buffer: bool) -> dict[str, Any]:
        module = self._modules[number]
        return module._buffers if buffer else module.__dict__

    def _values(self) -> dict[Place, Any]:
        found: dict[Place, Any] = {}
        for number, module in enumerate(self._modules):
            found.update({(number, True, name): buffer for name, buffer in module._buffers.items()})
            found.update({(number, False, name): v for name, v in module.__dict__.items() if name not in _OWN})
        return found


def _is_value(value: Any) -> bool:
    return value is None or isinstance(value, (Tensor, bool, int, float, str))


def _is_small(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout is torch.strided and value.nbytes <= SMALL_BYTES
    return type(value) in _CONTAINERS or isinstance(value, torch.Generator)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return copy.copy(value) if type(value) in _CONTAINERS else value


def _changed(value: Any, kept: Any, *, compared: bool) -> bool:
    """Whether a tensor has other values than its copy, or a list, dict or set has other tensors with a graph.

    compared: the forward was only compared: what it wrote is put back, and lists and dicts may differ.
    """
    if isinstance(value, Tensor):
        changed = _differ(value, kept)
        if changed and compared:
            value.detach().copy_(kept)
        return changed
    if compared and isinstance(value, torch.Generator):
        value.set_state(kept.get_state())
    if type(value) not in _CONTAINERS:
        return False
    if compared:
        value.clear()
        (value.extend if isinstance(value, list) else value.update)(kept)
    known = {id(tensor) for tensor in tensors_of(kept)}
    return any(tensor.requires_grad and id(tensor) not in known for tensor in tensors_of(value))


def _differ(left: Tensor, right: Tensor) -> bool:
    """Whether values differ, though the version may be the same: batch_norm's kernels do not count their writes."""
    try:
        return left.shape != right.shape or not torch.equal(left.detach(), right.detach())
    except (RuntimeError, NotImplementedError):  # of a layout that cannot be compared, such as sparse
        return False


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0

"""Makes one native call for a list of parameters, and reuses it in every step while the tensors do not move.

Owns the native batch and references to every tensor whose address it holds. A step of a thousand small parameters
spends its time here, in Python. Therefore nothing is rebuilt that can be compared by identity, and loops are `map`s of
C functions, which take a third of the time of a statement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from zero_optim_cpu import _native
from zero_optim_cpu.kernels import Kernels
from zero_optim_cpu.layouts import BYTE8, SPLIT, Layout
from zero_optim_cpu.rules import Rule
from zero_optim_cpu.tensors import check, dtype_code


def native_item(rule: Rule, layout: Layout, parameter: Tensor, states: Mapping[str, Any]) -> Any:
    """Checks every tensor and returns the native record of a parameter with its states."""
    code = dtype_code("parameter", check("parameter", parameter).dtype)
    numel = parameter.numel()
    addresses: dict[str, int] = {}
    for field in layout.fields(rule, numel, parameter.dtype):
        if field.name not in states:
            raise KeyError(
                f"no state {field.name!r} in layout {layout.name!r}: there are {sorted(states)}, and the parameter is "
                f"{parameter.dtype}; if it was cast after a step, cast it before the optimizer is made"
            )
        tensor = check(field.name, states[field.name], numel=field.numel, dtype=field.dtype)
        addresses[field.name] = tensor.data_ptr()
    master = addresses.get("remainder" if layout.master_of(parameter.dtype) == SPLIT else "master", 0)
    slots, scales = [0, 0], [0, 0]
    for name, slot in rule.states:
        slots[slot] = addresses[name]
        scales[slot] = addresses[f"{name}_scale"] if layout.moments == BYTE8 else 0
    return _native.Item(parameter.data_ptr(), code, master, slots, scales, numel)


def same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Returns whether these are the same objects, one by one."""
    return len(ours) == len(theirs) and all(map(is_, ours, theirs))


def places_of(parameters: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """Returns what ``.data =``, ``set_`` and ``resize_`` can change without replacing the object."""
    readers = (Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous, attrgetter("dtype"))
    return tuple(list(map(read, parameters)) for read in readers)


class Dispatch:
    """A native batch of contiguous CPU parameters and their states.

    The lists have one element per parameter. Gradients are not kept, since a caller frees them between steps.

    Raises:
        TypeError, ValueError: ``check`` refuses a tensor, or buffers overlap.
    """

    def __init__(
        self,
        kernels: Kernels,
        layout: Layout,
        rule: Rule,
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Any]],
    ) -> None:
        self._rule = rule
        self.batch = _native.Batch(kernels.table, rule.code, layout.moments)
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            item, kind = native_item(rule, layout, parameter, state), layout.master_of(parameter.dtype)
            check("gradient", gradient, numel=parameter.numel())
            self.batch.add(item, kind, gradient.data_ptr(), dtype_code("gradient", gradient.dtype), ())
        self.batch.check_disjoint()
        # `fits` compares with these. The references keep the memory alive even if the caller drops its own.
        self._parameters, self._states = parameters, states
        self._places = places_of(parameters)
        self._gradient_dtypes = [gradient.dtype for gradient in gradients]
        held = [(state, name, value) for state in states for name, value in state.items() if isinstance(value, Tensor)]
        self._holders: list[dict[str, Any]] = [holder for holder, _, _ in held]
        self._names = [name for _, name, _ in held]
        self._tensors = [tensor for _, _, tensor in held]
        self._state_places = list(map(Tensor.data_ptr, self._tensors))

    def fits(self, rule: Rule, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]]) -> bool:
        """Returns whether the batch was built for this rule and these tensors, and none of them has moved since."""
        return (
            rule is self._rule
            and same(parameters, self._parameters)
            and same(states, self._states)
            and places_of(parameters) == self._places
            and [gradient.dtype for gradient in gradients] == self._gradient_dtypes
            and all(map(dict.__contains__, states, repeat("step")))
            and same(list(map(dict.get, self._holders, self._names)), self._tensors)
            and list(map(Tensor.data_ptr, self._tensors)) == self._state_places
        )

    def refresh(self, gradients: list[Tensor], groups: list[dict[str, Any]]) -> None:
        """Counts a step of every parameter and takes its gradient, which was checked, and the options of its group."""
        steps = [int(state["step"]) + 1 for state in self._states]
        hypers: dict[tuple[int, int], Any] = {}
        of_each = []
        options, number, hyper = None, 0, None  # of the previous parameter, which the next one usually shares
        for group, step in zip(groups, steps, strict=True):
            if group is not options or step != number:
                options, number = group, step
                hyper = hypers.get((id(group), step))
                if hyper is None:
                    hyper = hypers[id(group), step] = self._rule.hyper(group, step)
            of_each.append(hyper)
        self.batch.refresh(list(map(Tensor.data_ptr, gradients)), of_each)
        for state, step in zip(self._states, steps, strict=True):
            state["step"] = step

"""One native dispatch for a list of parameters, kept from step to step while the tensors stay where they are.

Owns the native batch and references to every tensor whose address it holds. A step of a thousand small parameters
spends its time here, in Python: what can be compared by identity is not built again, and loops are `map`s of functions
in C, which take a third of a statement's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from zero_optim_cpu import _native
from zero_optim_cpu.engine import Engine
from zero_optim_cpu.layouts import BYTE8, FULL, SPLIT, STOCHASTIC, Layout
from zero_optim_cpu.rules import Rule
from zero_optim_cpu.tensors import check, dtype_code


def native_item(rule: Rule, layout: Layout, parameter: Tensor, states: Mapping[str, Any]) -> tuple[Any, int]:
    """The native record of a parameter with its states, every tensor checked, and the kind of its master."""
    code = dtype_code("parameter", check("parameter", parameter).dtype)
    numel, kind = parameter.numel(), layout.master_of(parameter.dtype)
    addresses: dict[str, int] = {}
    for field in layout.fields(rule, numel, parameter.dtype):
        if field.name not in states:
            raise KeyError(
                f"no state {field.name!r} in layout {layout.name!r}: there are {sorted(states)}, and the parameter is "
                f"{parameter.dtype}; if it was cast after a step, cast it before the optimizer is made"
            )
        tensor = check(field.name, states[field.name], numel=field.numel, dtype=field.dtype)
        addresses[field.name] = tensor.data_ptr()
    master = addresses["remainder"] if kind == SPLIT else addresses.get("master", 0) if kind == FULL else 0
    slots, scales = [0, 0], [0, 0]
    for name, slot in rule.states:
        slots[slot] = addresses[name]
        scales[slot] = addresses[f"{name}_scale"] if layout.moments == BYTE8 else 0
    return _native.Item(parameter.data_ptr(), code, master, slots, scales, numel), kind


def same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether these are the same objects, one by one."""
    return len(ours) == len(theirs) and all(map(is_, ours, theirs))


def places_of(parameters: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """What ``.data =``, ``set_`` and ``resize_`` may change under objects that stay the same."""
    readers = (Tensor.data_ptr, Tensor.numel, Tensor.is_contiguous, attrgetter("dtype"))
    return tuple(list(map(read, parameters)) for read in readers)


class Dispatch:
    """A native batch of these parameters, contiguous CPU tensors, and their states.

    Gradients are not kept: a caller frees them between steps. Each argument is a list with an element a parameter.

    Raises:
        TypeError, ValueError: a tensor that ``check`` refuses, buffers that overlap.
    """

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        rule: Rule,
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[dict[str, Any]],
    ) -> None:
        self._rule = rule
        self.batch = _native.Batch(engine.table, rule.code, layout.moments)
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            item, kind = native_item(rule, layout, parameter, state)
            check("gradient", gradient, numel=parameter.numel())
            counter = int(state["counter"]) if kind == STOCHASTIC else 0
            self.batch.add(item, kind, gradient.data_ptr(), dtype_code("gradient", gradient.dtype), counter, ())
        self.batch.check_disjoint()
        # What `fits` compares with. The references keep the memory, whatever becomes of the caller's.
        self._parameters, self._states = parameters, states
        self._places = places_of(parameters)
        self._gradient_dtypes = [gradient.dtype for gradient in gradients]
        held = [(state, name, value) for state in states for name, value in state.items() if isinstance(value, Tensor)]
        self._holders: list[dict[str, Any]] = [holder for holder, _, _ in held]
        self._names = [name for _, name, _ in held]
        self._tensors = [tensor for _, _, tensor in held]

    def fits(self, rule: Rule, parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Any]]) -> bool:
        """Whether rule, parameters and states are those that the batch was built of, where they were."""
        return (
            rule is self._rule
            and same(parameters, self._parameters)
            and same(states, self._states)
            and places_of(parameters) == self._places
            and [gradient.dtype for gradient in gradients] == self._gradient_dtypes
            and all(map(dict.__contains__, states, repeat("step")))
            and same(list(map(dict.get, self._holders, self._names)), self._tensors)
        )

    def refresh(self, gradients: list[Tensor], groups: list[dict[str, Any]]) -> None:
        """Count a step of every parameter; take its gradient (checked) and the options of its group."""
        steps = [int(state["step"]) + 1 for state in self._states]
        hypers: dict[tuple[int, int], Any] = {}
        of_each = []
        options, number, hyper = None, 0, None  # of the one before: the next is most often like it
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

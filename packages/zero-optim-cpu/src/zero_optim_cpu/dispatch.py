"""One native dispatch for a list of parameters, kept from step to step while the tensors stay where they are.

Owns the native batch and references to every tensor whose address it holds. A step of a thousand small parameters
spends its time here, in Python: what can be compared by identity is not built again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zero_optim_cpu import _native
from zero_optim_cpu.engine import Engine
from zero_optim_cpu.layouts import BYTE8, FULL, SPLIT, STOCHASTIC, Layout
from zero_optim_cpu.rules import Rule
from zero_optim_cpu.tensors import check, dtype_code


@dataclass(frozen=True)
class Entry:
    """One parameter to update: contiguous CPU tensors of one size; ``options`` is its param group."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Any]
    options: Mapping[str, Any]


def native_item(rule: Rule, layout: Layout, parameter: Tensor, states: Mapping[str, Any]) -> tuple[Any, int]:
    """The native record of a parameter with its states, every tensor checked, and the kind of its master."""
    code = dtype_code("parameter", check("parameter", parameter).dtype)
    numel, kind = parameter.numel(), layout.master_of(parameter.dtype)
    addresses: dict[str, int] = {}
    for field in layout.fields(rule, numel, parameter.dtype):
        if field.name not in states:
            raise KeyError(f"no state {field.name!r} in layout {layout.name!r}: there are {sorted(states)}")
        tensor = check(field.name, states[field.name], numel=field.numel, dtype=field.dtype)
        addresses[field.name] = tensor.data_ptr()
    master = addresses["remainder"] if kind == SPLIT else addresses.get("master", 0) if kind == FULL else 0
    slots, scales = [0, 0], [0, 0]
    for name, slot in rule.states:
        slots[slot] = addresses[name]
        scales[slot] = addresses[f"{name}_scale"] if layout.moments == BYTE8 else 0
    return _native.Item(parameter.data_ptr(), code, master, slots, scales, numel), kind


class Dispatch:
    """A native batch of these entries.

    Raises:
        TypeError, ValueError: a tensor that ``check`` refuses, buffers that overlap, options out of range.
    """

    def __init__(self, engine: Engine, layout: Layout, rule: Rule, entries: Sequence[Entry]) -> None:
        self._engine, self._rule = engine, rule
        self.batch = _native.Batch(engine.table, rule.code, layout.moments)
        for entry in entries:
            item, kind = native_item(rule, layout, entry.parameter, entry.state)
            gradient = check("gradient", entry.gradient, numel=entry.parameter.numel())
            counter = int(entry.state["counter"]) if kind == STOCHASTIC else 0
            code = dtype_code("gradient", gradient.dtype)
            self.batch.add(item, kind, gradient.data_ptr(), code, counter, ())
        self.batch.check_disjoint()
        # What `fits` compares with. The references keep the memory, whatever becomes of the caller's.
        self._parameters = [entry.parameter for entry in entries]
        self._addresses = [entry.parameter.data_ptr() for entry in entries]
        self._states = [{k: v for k, v in entry.state.items() if isinstance(v, Tensor)} for entry in entries]
        self._gradient_dtypes = [entry.gradient.dtype for entry in entries]

    def fits(self, rule: Rule, entries: Sequence[Entry]) -> bool:
        """Whether rule, parameters and states are those that the batch was built of, where they were."""
        if rule is not self._rule or len(entries) != len(self._parameters):
            return False
        for k, entry in enumerate(entries):
            if entry.parameter is not self._parameters[k] or entry.gradient.dtype is not self._gradient_dtypes[k]:
                return False
            if entry.parameter.data_ptr() != self._addresses[k]:
                return False
            state = entry.state
            for name, tensor in self._states[k].items():
                if state.get(name) is not tensor:
                    return False
        return True

    def refresh(self, entries: Sequence[Entry]) -> None:
        """Count a step of every entry, and take its gradient and options."""
        hypers: dict[tuple[int, int], Any] = {}
        of_each, addresses = [], []
        for entry in entries:
            gradient = check("gradient", entry.gradient, numel=entry.parameter.numel())
            addresses.append(gradient.data_ptr())
            step = int(entry.state["step"]) + 1
            key = (id(entry.options), step)
            hyper = hypers.get(key)
            if hyper is None:
                hyper = hypers[key] = self._rule.hyper(entry.options, step)
            of_each.append(hyper)
        self.batch.refresh(addresses, of_each)
        for entry in entries:
            entry.state["step"] = int(entry.state["step"]) + 1

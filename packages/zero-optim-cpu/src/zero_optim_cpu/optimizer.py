"""What the stand-alone optimizers share: states beside each parameter, one dispatch a step, state dicts.

The arithmetic is in the native kernels; what each optimizer is, in ``rules``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from zero_optim_cpu import _native
from zero_optim_cpu.engine import Engine
from zero_optim_cpu.layouts import BYTE8, FULL, SPLIT, STOCHASTIC, layout_named
from zero_optim_cpu.rules import Rule, refuse_options, rule_in_use
from zero_optim_cpu.step import Handle
from zero_optim_cpu.tensors import check, dtype_code


class CpuOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose step is one native dispatch over all parameters.

    fp32 parameters are updated in place. A bf16 parameter has an exact fp32 master: its 16-bit remainder is in the
    state (layout "split"), or a whole fp32 copy (layout "fp32"); fp16 parameters have the copy. The layouts
    "split_bf16m", "split_8bit" and "bf16_stochastic" trade exactness for memory (see ``layouts``).
    """

    rule: ClassVar[Rule]

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        layout: str = "split",
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        self._layout = layout_named(layout)
        self._arguments = (threads, isa)
        self._engine = Engine(threads, isa)
        self._counted = 0  # elements that have a state: the counter of stochastic rounding
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        refuse_options(self.rule, (group,))
        for parameter in group["params"]:
            check("parameter", parameter)
            dtype_code("parameter", parameter.dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, scale: float = 1.0) -> Any:
        """One step. ``scale`` multiplies every gradient on the way in: a clip coefficient, an inverse loss scale."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batch, _ = self._batch()
        batch.run(self._engine.pool, float(scale))
        return loss

    @torch.no_grad()
    def start(self, *, scale: float = 1.0) -> Handle:
        """Begin a step and return at once. Leave parameters, gradients and states alone until the handle is done."""
        batch, keep = self._batch()
        return Handle(batch.start(self._engine.pool, float(scale), keep))

    @torch.no_grad()
    def count_nonfinite(self) -> int:
        """How many elements of all gradients are NaN or infinite. A caller may skip the step."""
        total = 0
        for parameter, gradient in self._gradients():
            del parameter
            code = dtype_code("gradient", gradient.dtype)
            total += int(
                _native.count_nonfinite(
                    self._engine.pool, self._engine.table, gradient.data_ptr(), code, gradient.numel()
                )
            )
        return total

    # ---- states --------------------------------------------------------------------------------------------------

    def _gradients(self) -> Iterable[tuple[Tensor, Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter.grad.layout == torch.strided and not parameter.grad.is_contiguous():
                        yield parameter, parameter.grad.contiguous()
                    else:
                        yield parameter, check("gradient", parameter.grad, numel=parameter.numel())

    def _initial_value(self, name: str) -> float:
        return float(self.defaults.get("initial_accumulator_value", 0.0)) if name == "sum" else 0.0

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        """Zero moments; the master is what the parameter holds."""
        state: dict[str, Any] = {"step": 0}
        numel = parameter.numel()
        for field in self._layout.fields(self._rule_in_use(), numel, parameter.dtype):
            shape = parameter.shape if field.numel == numel else (field.numel,)
            state[field.name] = torch.zeros(shape, dtype=field.dtype)
        if "master" in state:
            state["master"].copy_(parameter)
        if "counter" in state:
            state["counter"].fill_(self._counted)
        self._counted += numel
        for name, slot in self._rule_in_use().states:
            initial = self._initial_value(name)
            if initial != 0.0:
                values = torch.full((numel,), initial)
                item, _ = self._item(parameter, state)
                _native.encode_moment(self._engine.pool, item, slot, self._layout.moments, values.data_ptr())
        return state

    def _rule_in_use(self) -> Rule:
        return rule_in_use(self.rule, self.param_groups)

    def _item(self, parameter: Tensor, state: dict[str, Any]) -> tuple[Any, int]:
        kind = self._layout.master_of(parameter.dtype)
        master = 0
        if kind == SPLIT:
            master = state["remainder"].data_ptr()
        elif kind == FULL and parameter.dtype != torch.float32:
            master = state["master"].data_ptr()
        states, scales = [0, 0], [0, 0]
        for name, slot in self._rule_in_use().states:
            states[slot] = state[name].data_ptr()
            scales[slot] = state[f"{name}_scale"].data_ptr() if self._layout.moments == BYTE8 else 0
        code = dtype_code("parameter", parameter.dtype)
        return _native.Item(parameter.data_ptr(), code, master, states, scales, parameter.numel()), kind

    def _batch(self) -> tuple[Any, list[Any]]:
        rule = self._rule_in_use()
        refuse_options(rule, self.param_groups)
        batch = _native.Batch(self._engine.table, rule.code, self._layout.moments)
        keep: list[Any] = []
        options = {id(p): group for group in self.param_groups for p in group["params"]}
        for parameter, gradient in self._gradients():
            check("parameter", parameter)
            state = self.state[parameter]
            if not state:
                state.update(self._new_state(parameter))
            state["step"] = int(state["step"]) + 1
            hyper = rule.hyper(options[id(parameter)], state["step"])
            item, kind = self._item(parameter, state)
            counter = int(state["counter"]) if kind == STOCHASTIC else 0
            code = dtype_code("gradient", gradient.dtype)
            segments = [(0, parameter.numel(), hyper)]
            batch.add(item, kind, gradient.data_ptr(), code, counter, segments)
            keep.append((parameter, gradient, state))
        return batch, keep

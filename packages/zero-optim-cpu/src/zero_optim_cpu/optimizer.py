"""Keeps the states of the stand-alone optimizers, steps them in one native call, and saves and loads them.

The native kernels do the arithmetic, and ``rules`` describes each optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, ClassVar

import torch
from torch import Tensor

from zero_optim_cpu import _native
from zero_optim_cpu._native import Handle
from zero_optim_cpu.dispatch import Dispatch, native_item
from zero_optim_cpu.kernels import Kernels
from zero_optim_cpu.layouts import BYTE8, layout_named
from zero_optim_cpu.rules import Rule, refuse_options, rule_in_use
from zero_optim_cpu.tensors import check, dtype_code

_NOT_NEGATIVE = frozenset({"lr", "eps", "weight_decay", "momentum", "lr_decay", "initial_accumulator_value"})


def _ready(parameters: list[Tensor], gradients: list[Tensor]) -> bool:
    """Returns whether `check` would pass all gradients and none needs a copy."""
    return (
        all(map(is_, map(attrgetter("layout"), gradients), repeat(torch.strided)))
        and all(map(attrgetter("is_cpu"), gradients))
        and all(map(Tensor.is_contiguous, gradients))
        and list(map(Tensor.numel, gradients)) == list(map(Tensor.numel, parameters))
    )


class CpuOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose step is one native dispatch over all parameters.

    fp32 parameters are updated in place. A bf16 parameter has an exact fp32 master, stored as a 16-bit remainder
    (layout "split") or as an fp32 copy (layout "fp32"). An fp16 parameter always has the copy. The layouts
    "split_bf16m" and "split_8bit" trade the exactness of moments for memory (see ``layouts``).

    A gradient may be fp32, bf16 or fp16, whatever the parameter is. Parameters without a gradient are skipped.
    """

    optimizer_contract = "elementwise"  # for zero-core: parts of a parameter may be stepped apart
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
        for name, value in defaults.items():
            if name == "betas" and not all(0.0 <= beta < 1.0 for beta in value):
                raise ValueError(f"betas={value}: each must be at least 0 and below 1")
            if name in _NOT_NEGATIVE and float(value) < 0.0:
                raise ValueError(f"{name}={value} is negative; to ascend, pass maximize=True")
        self._configure(layout, threads, isa)
        super().__init__(params, defaults)

    def _configure(self, layout: str, threads: int | None, isa: str | None) -> None:
        self._arguments = (layout, threads, isa)
        self._layout = layout_named(layout)
        self._kernels = Kernels(threads, isa)
        self._dispatch: Dispatch | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Does what torch's does. Raises TypeError or ValueError for parameters and options that have no kernel."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            refuse_options(self.rule, (group,))
            for parameter in group["params"]:
                check("parameter", parameter)
                dtype_code("parameter", parameter.dtype)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, scale: float = 1.0) -> Any:
        """Updates all parameters. ``scale`` (a clip coefficient, an inverse loss scale) multiplies every gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        dispatch, _ = self._prepare()
        dispatch.batch.run(self._kernels.pool, float(scale))
        return loss

    @torch.no_grad()
    def start(self, *, scale: float = 1.0) -> Handle:
        """Begins a step and returns at once. Do not use parameters, gradients or states until the handle is done."""
        dispatch, gradients = self._prepare()
        return dispatch.batch.start(self._kernels.pool, float(scale), (dispatch, gradients))

    @torch.no_grad()
    def count_nonfinite(self) -> int:
        """Returns how many elements of all gradients are NaN or infinite, so that a caller can skip the step."""
        gradients = self._with_gradients()[1]
        return sum(self._kernels.reduce(_native.count_nonfinite, "gradient", gradient) for gradient in gradients)

    # ---- dispatch ------------------------------------------------------------------------------------------------

    def _with_gradients(self) -> tuple[list[Tensor], list[Tensor], list[dict[str, Any]]]:
        """Returns the parameters with a gradient, the gradients (copied if they are not contiguous), and the groups."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        groups = [group for group in self.param_groups for _ in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        if any(map(is_, gradients, repeat(None))):
            kept = [k for k, gradient in enumerate(gradients) if gradient is not None]
            parameters, gradients, groups = ([row[k] for k in kept] for row in (parameters, gradients, groups))
        if not _ready(parameters, gradients):
            gradients = [g.contiguous() if g.layout == torch.strided else g for g in gradients]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                check("gradient", gradient, numel=parameter.numel())
        return parameters, gradients, groups

    def _prepare(self) -> tuple[Dispatch, list[Tensor]]:
        """Returns the dispatch of this step and the gradients that it reads."""
        refuse_options(self.rule, self.param_groups)
        rule = rule_in_use(self.rule, self.param_groups)
        parameters, gradients, groups = self._with_gradients()
        states = [self.state[parameter] for parameter in parameters]
        if self._dispatch is None or not self._dispatch.fits(rule, parameters, gradients, states):
            for parameter, state in zip(parameters, states, strict=True):
                if not state or any(name not in state for name in rule.state_names):
                    self._complete_state(rule, parameter, state)
            self._dispatch = Dispatch(self._kernels, self._layout, rule, parameters, gradients, states)
        self._dispatch.refresh(gradients, groups)
        return self._dispatch, gradients

    # ---- states --------------------------------------------------------------------------------------------------

    def _complete_state(self, rule: Rule, parameter: Tensor, state: dict[str, Any]) -> None:
        """Adds missing states: moments are zero, the master is a copy of the parameter, and the step count is zero."""
        state["step"] = 0
        numel = check("parameter", parameter).numel()
        fresh: set[str] = set()
        for field in self._layout.fields(rule, numel, parameter.dtype):
            if field.name in state:
                continue
            fresh.add(field.name)
            shape = parameter.shape if field.numel == numel else (field.numel,)
            state[field.name] = torch.zeros(shape, dtype=field.dtype, device="cpu")
        if "master" in fresh:
            state["master"].copy_(parameter)
        if "sum" in fresh and (initial := float(self.defaults.get("initial_accumulator_value", 0.0))):
            values = torch.full((numel,), initial, dtype=torch.float32, device="cpu")
            self._write_moment(rule, parameter, state, "sum", values)

    def _write_moment(self, rule: Rule, parameter: Tensor, state: dict[str, Any], name: str, values: Tensor) -> None:
        """Encodes fp32 values (numel,) into a state, as the layout stores it."""
        item = native_item(rule, self._layout, parameter, state)
        values = values.detach().to(torch.float32).contiguous()
        _native.encode(self._kernels.pool, item, dict(rule.states)[name], self._layout.moments, values.data_ptr())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of this class or of its twin in ``torch.optim``. Encodes fp32 moments as this layout does.

        Raises:
            ValueError: param groups that do not match (as torch's does), or states of another layout, by name.
        """
        super().load_state_dict(state_dict)
        self._dispatch = None
        # torch casts floating-point states to the parameter's dtype, which would round a bf16 parameter's moments and
        # its remainder, so the values are taken from the dict again.
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number)
            if saved:
                self._load_state(parameter, saved)

    def _load_state(self, parameter: Tensor, saved: dict[str, Any]) -> None:
        rule = rule_in_use(self.rule, self.param_groups)
        state: dict[str, Any] = {}
        self._complete_state(rule, parameter, state)
        state["step"] = int(saved.get("step", 1))  # torch's SGD has none, but a buffer means that a step was made
        given = {name: value for name, value in saved.items() if isinstance(value, Tensor) and name != "step"}
        for name, value in given.items():
            if name not in state:
                raise ValueError(f"the state dict has {name!r}, which layout {self._layout.name!r} does not have")
            if value.dtype == state[name].dtype:
                state[name].copy_(check(name, value, numel=state[name].numel()).view_as(state[name]))
            elif name in rule.state_names and value.is_floating_point():
                self._write_moment(rule, parameter, state, name, check(name, value.contiguous()).flatten())
            else:
                raise ValueError(f"the state dict has {name!r} as {value.dtype}, this layout has {state[name].dtype}")
        if self._layout.moments == BYTE8:
            for name in rule.state_names:
                if name in given and given[name].dtype == torch.uint8 and f"{name}_scale" not in given:
                    raise ValueError(f"the state dict has codes {name!r} without {name}_scale")
        self.state[parameter] = state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_arguments": self._arguments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        arguments = state.pop("_arguments", None)
        if arguments is not None:  # unpickled or copied; torch's load_state_dict calls this too, without them
            self._configure(*arguments)
        super().__setstate__(state)

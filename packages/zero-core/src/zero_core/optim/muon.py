"""Implements `Muon` for matrices and stacks of them, orthogonalised in fp32 or bf16 (Jordan et al. 2024).

Owns its arithmetic. Its methods say to stores that it needs whole parameters, as those of any optimizer do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),  # of torch from 2.15 on
}


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with the option `orthogonal` and for stacks: (E, m, n), as of experts, are E matrices.

    orthogonal: "float32", or "bfloat16", in which it has the bits of torch.optim.Muon on matrices. States and other
    options are torch 2.15's, so each loads the other's state dict. It works on a plain model too, with the same bits.
    With nesterov=False torch before 2.15 overwrites the momentum of a bf16 parameter with the orthogonalised one; this
    one keeps it, as 2.15 does.

    Raises ValueError for a parameter that is neither a matrix nor a stack of them, and for options out of range.

    Examples:
        >>> import torch, zero_core
        >>> model = torch.nn.Linear(4, 4, bias=False)
        >>> optimizer = zero_core.shard(model, zero_core.Muon(model.parameters(), lr=0.02))
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.close()
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        orthogonal: str = "float32",
    ) -> None:
        if min(lr, weight_decay, momentum) < 0 or len(ns_coefficients) != 3:
            raise ValueError(
                f"Muon with lr={lr}, weight_decay={weight_decay}, momentum={momentum}, ns_coefficients="
                f"{ns_coefficients}: give rates of at least 0 and three coefficients"
            )
        for name, value, known in (
            ("adjust_lr_fn", adjust_lr_fn or "original", _SCALES),
            ("orthogonal", orthogonal, _DTYPES),
        ):
            if value not in known:
                raise ValueError(f"Muon with {name}={value!r}: choose one of {', '.join(known)}")
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov, "eps": eps}
        schulz = {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "orthogonal": orthogonal}
        super().__init__(params, {**options, **schulz, "adjust_lr_fn": adjust_lr_fn})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as torch's method does. Raises ValueError as the class does."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dim() not in (2, 3):
                self.param_groups.pop()
                raise ValueError(
                    f"Muon over a parameter of shape {tuple(p.shape)}: give it matrices and stacks (E, m, n) of them, "
                    "and the others to an AdamW of their own"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # groups of torch.optim.Muon lack this option
            group.setdefault("orthogonal", self.defaults["orthogonal"])

    def needs_uncut(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
        """Implements zero_core.optim.uncut.NeedsUncut."""
        return len(shape) in (2, 3)

    def steps_rows(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
        """Implements zero_core.optim.uncut.StepsRows: the matrices of a stack are independent of each other."""
        return len(shape) == 3

    def scratch_bytes(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> int:
        """Returns the most bytes that a step needs beside a parameter of `shape`, its gradient and its states: for one
        matrix the weighted momentum and three forms of it, and two squares of its smaller side."""
        each = _DTYPES[group["orthogonal"]].itemsize
        return (4 + 3 * each) * math.prod(shape[-2:]) + 2 * each * min(shape[-2:]) ** 2

    def step_flop(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, torch.dtype]:
        """Returns the FLOP of a step over such a parameter, and their dtype, for predictions: see `schulz_flop`."""
        return schulz_flop(shape, group["ns_steps"]), _DTYPES[group["orthogonal"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(p.grad)
                    # One by one: it takes the memory of one matrix, and an expert has the same bits in any part of its
                    # stack, even if the end of a loop over elements should round otherwise.
                    stacks = p, p.grad, state["momentum_buffer"]
                    parts = (values.unbind() if values.dim() == 3 else (values,) for values in stacks)
                    for matrix, gradient, mean in zip(*parts, strict=True):
                        _advance(matrix, gradient, mean, group)
        return loss


def _advance(matrix: Tensor, gradient: Tensor, mean: Tensor, group: Mapping[str, Any]) -> None:
    mean.lerp_(gradient, 1 - group["momentum"])
    wanted = gradient.lerp(mean, group["momentum"]) if group["nesterov"] else mean
    matrix.mul_(1 - group["lr"] * group["weight_decay"])
    steps, eps, dtype = group["ns_steps"], group["eps"], _DTYPES[group["orthogonal"]]
    found = newton_schulz(wanted, group["ns_coefficients"], steps=steps, eps=eps, dtype=dtype)
    matrix.add_(found, alpha=-group["lr"] * _SCALES[group["adjust_lr_fn"] or "original"](*matrix.shape))


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float], *, steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """Returns (m, n) of `dtype`: the matrix with all of its singular values near 1, by an odd polynomial of degree 5 in
    each step. eps: the least norm by which it is divided first."""
    a, b, c = coefficients
    wide = matrix if matrix.size(0) <= matrix.size(1) else matrix.T
    found = wide.to(dtype, copy=True)
    found.div_(found.norm().clamp(min=eps))
    for _ in range(steps):
        square = found @ found.T
        found = torch.addmm(found, torch.addmm(square, square, square, beta=b, alpha=c), found, beta=a)
    return found if wide is matrix else found.T


def schulz_flop(shape: tuple[int, ...], steps: int) -> int:
    """Returns the FLOP of `newton_schulz` over a matrix or a stack of them: three products in each step. One of them
    squares a square matrix, whose side is the smaller one."""
    *stack, rows, columns = shape
    short, long = sorted((rows, columns))
    return math.prod(stack) * steps * (4 * short**2 * long + 2 * short**3)

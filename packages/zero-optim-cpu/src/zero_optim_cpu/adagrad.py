"""Adagrad with ``torch.optim``'s semantics (Duchi et al. 2011)."""

from __future__ import annotations

from typing import Any

from zero_optim_cpu.optimizer import CpuOptimizer
from zero_optim_cpu.rules import ADAGRAD, register


class Adagrad(CpuOptimizer):
    """Adagrad.

    Args:
        params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as ``torch.optim.Adagrad``.
            Sparse gradients are refused.
        layout, threads, isa: as ``CpuStep``.
    """

    rule = ADAGRAD

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        layout: str = "split",
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        values = {"lr": float(lr), "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        for name, value in (values | {"initial_accumulator_value": initial_accumulator_value}).items():
            if value < 0.0:
                raise ValueError(f"{name}={value} is negative")
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        defaults["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(params, defaults, layout=layout, threads=threads, isa=isa)


register(Adagrad, ADAGRAD)

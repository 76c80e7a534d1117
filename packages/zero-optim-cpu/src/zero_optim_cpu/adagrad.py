"""Implements Adagrad with the semantics of ``torch.optim`` (Duchi et al. 2011)."""

from __future__ import annotations

from typing import Any

from zero_optim_cpu.optimizer import CpuOptimizer
from zero_optim_cpu.rules import ADAGRAD


class Adagrad(CpuOptimizer):
    """Adagrad (Duchi, Hazan and Singer 2011).

    Takes the arguments of ``torch.optim.Adagrad`` by their names, and ``layout``, ``threads`` and ``isa`` as
    ``CpuStep`` does. Sparse gradients are refused.
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
        **native: Any,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        defaults["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(params, defaults, **native)

"""Implements SGD with the momentum, dampening and Nesterov options of ``torch.optim``."""

from __future__ import annotations

from typing import Any

from zero_optim_cpu.optimizer import CpuOptimizer
from zero_optim_cpu.rules import SGD_MOMENTUM


class SGD(CpuOptimizer):
    """SGD. Without momentum it has no states.

    Takes the arguments of ``torch.optim.SGD`` by their names, and ``layout``, ``threads`` and ``isa`` as ``CpuStep``
    does.
    """

    rule = SGD_MOMENTUM

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        **native: Any,
    ) -> None:
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError(
                f"nesterov=True needs momentum and no dampening, not momentum={momentum}, dampening={dampening}"
            )
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        defaults |= {"nesterov": nesterov, "maximize": maximize}
        super().__init__(params, defaults, **native)

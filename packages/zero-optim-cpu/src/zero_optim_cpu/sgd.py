"""Stochastic gradient descent with ``torch.optim``'s momentum, dampening and Nesterov."""

from __future__ import annotations

from typing import Any

from zero_optim_cpu.optimizer import CpuOptimizer
from zero_optim_cpu.rules import SGD_MOMENTUM, register


class SGD(CpuOptimizer):
    """SGD; without a momentum there is no state.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as ``torch.optim.SGD``.
        layout, threads, isa: as ``CpuStep``.
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
        layout: str = "split",
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        for name, value in {"lr": float(lr), "momentum": momentum, "weight_decay": weight_decay}.items():
            if value < 0.0:
                raise ValueError(f"{name}={value} is negative")
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError(
                f"nesterov wants a momentum and no dampening, not momentum={momentum}, dampening={dampening}"
            )
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        defaults |= {"nesterov": nesterov, "maximize": maximize}
        super().__init__(params, defaults, layout=layout, threads=threads, isa=isa)


register(SGD, SGD_MOMENTUM)

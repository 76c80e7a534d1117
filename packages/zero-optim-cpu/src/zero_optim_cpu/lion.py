"""Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675). ``torch.optim`` has none."""

from __future__ import annotations

from typing import Any

from zero_optim_cpu.optimizer import CpuOptimizer
from zero_optim_cpu.rules import LION, register


class Lion(CpuOptimizer):
    """Lion, with decoupled weight decay.

        direction = sign(beta1 * m + (1 - beta1) * g);  m = beta2 * m + (1 - beta2) * g
        p = p - lr * (direction + weight_decay * p)

    Args:
        params: as ``torch.optim``.
        lr: about a tenth of what AdamW would have.
        betas: of the direction, and of the state.
        weight_decay: times ``lr``, times the parameter.
        maximize: ascend.
        layout, threads, isa: as ``CpuStep``.
    """

    rule = LION

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        layout: str = "split",
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        if float(lr) < 0.0:
            raise ValueError(f"lr={lr}: a learning rate is not negative; use maximize=True to ascend")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas={betas}: each is within [0, 1)")
        if weight_decay < 0.0:
            raise ValueError(f"weight_decay={weight_decay} is negative")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, layout=layout, threads=threads, isa=isa)


register(Lion, LION)

"""Adam and AdamW with ``torch.optim``'s semantics and options."""

from __future__ import annotations

from typing import Any

from zero_optim_cpu.optimizer import CpuOptimizer
from zero_optim_cpu.rules import ADAM, ADAMW, register


def _check(lr: Any, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    if float(lr) < 0.0:
        raise ValueError(f"lr={lr}: a learning rate is not negative; use maximize=True to ascend")
    for name, beta in zip(("beta1", "beta2"), betas, strict=True):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name}={beta} is not within [0, 1)")
    if eps < 0.0:
        raise ValueError(f"eps={eps} is negative")
    if weight_decay < 0.0:
        raise ValueError(f"weight_decay={weight_decay} is negative")


class AdamW(CpuOptimizer):
    """AdamW: decoupled weight decay (Loshchilov & Hutter 2019). In place of ``torch.optim.AdamW`` for CPU parameters.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as ``torch.optim.AdamW``. ``amsgrad=True`` is refused.
        layout, threads, isa: as ``CpuStep``.
    """

    rule = ADAMW

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        layout: str = "split",
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        _check(lr, betas, eps, weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": True}
        super().__init__(params, defaults, layout=layout, threads=threads, isa=isa)


class Adam(CpuOptimizer):
    """Adam (Kingma & Ba 2015): weight decay is added to the gradient, unless ``decoupled_weight_decay``.

    Args:
        params, lr, betas, eps, weight_decay, maximize, decoupled_weight_decay: as ``torch.optim.Adam``.
            ``amsgrad=True`` is refused.
        layout, threads, isa: as ``CpuStep``.
    """

    rule = ADAM

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        layout: str = "split",
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        _check(lr, betas, eps, weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, defaults, layout=layout, threads=threads, isa=isa)


register(AdamW, ADAMW)
register(Adam, ADAM)

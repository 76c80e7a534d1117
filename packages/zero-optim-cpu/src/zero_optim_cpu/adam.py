"""Adam and AdamW with the semantics and options of ``torch.optim``."""

from __future__ import annotations

from typing import Any

from zero_optim_cpu.optimizer import CpuOptimizer
from zero_optim_cpu.rules import ADAM, ADAMW


class Adam(CpuOptimizer):
    """Adam (Kingma & Ba 2015). Weight decay is added to the gradient, unless ``decoupled_weight_decay`` is set.

    Args:
        params, lr, betas, eps, weight_decay, maximize, decoupled_weight_decay: as for ``torch.optim.Adam``.
            ``amsgrad=True`` is refused.
        layout, threads, isa: as for ``CpuStep``.
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
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, defaults, layout=layout, threads=threads, isa=isa)


class AdamW(Adam):
    """AdamW, with decoupled weight decay (Loshchilov & Hutter 2019). Replaces ``torch.optim.AdamW`` on the CPU.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as for ``torch.optim.AdamW``. ``amsgrad=True`` is refused.
        layout, threads, isa: as for ``CpuStep``.
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
        native: dict[str, Any] = {"layout": layout, "threads": threads, "isa": isa}
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True, **native
        )

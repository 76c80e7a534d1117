"""Implements Adam and AdamW with the semantics and options of ``torch.optim``."""

from __future__ import annotations

from typing import Any

from zero_optim_cpu.optimizer import CpuOptimizer
from zero_optim_cpu.rules import ADAM, ADAMW


class Adam(CpuOptimizer):
    """Adam (Kingma & Ba 2015). Weight decay is added to the gradient, unless ``decoupled_weight_decay`` is set.

    Takes the arguments of ``torch.optim.Adam`` by their names, and ``layout``, ``threads`` and ``isa`` as ``CpuStep``
    does. ``amsgrad=True`` is refused.
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
        **native: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": decoupled_weight_decay}
        super().__init__(params, defaults, **native)


class AdamW(Adam):
    """AdamW, with decoupled weight decay (Loshchilov & Hutter 2019). Replaces ``torch.optim.AdamW`` on the CPU.

    Takes the arguments of ``torch.optim.AdamW`` by their names, and ``layout``, ``threads`` and ``isa`` as ``CpuStep``
    does. ``amsgrad=True`` is refused.

    Examples:
        >>> import torch, zero_optim_cpu
        >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        >>> optimizer = zero_optim_cpu.AdamW([weight], lr=0.5, weight_decay=0.0)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.tolist()
        [0.5, 0.5, 0.5, 0.5]
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
        **native: Any,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True, **native
        )

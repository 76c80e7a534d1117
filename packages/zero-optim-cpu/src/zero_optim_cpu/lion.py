"""Implements Lion, which steps by the sign of an interpolated momentum (Chen et al. 2023, arXiv:2302.06675)."""

from __future__ import annotations

from typing import Any

import torch

from zero_optim_cpu.optimizer import CpuOptimizer
from zero_optim_cpu.rules import LION


class Lion(CpuOptimizer):
    """Lion, with decoupled weight decay.

        direction = sign(beta1 * m + (1 - beta1) * g);  m = beta2 * m + (1 - beta2) * g
        p = p - lr * (direction + weight_decay * p)

    Args:
        params: as for ``torch.optim``.
        lr: about a tenth of the learning rate for AdamW.
        betas: the first weights the momentum in the direction, the second in the new momentum.
        weight_decay: multiplied by ``lr`` and the parameter.
        maximize: whether to ascend.
        **native: ``layout``, ``threads`` and ``isa``, as for ``CpuStep``.
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
        **native: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, **native)

    @classmethod
    def over(cls, params: Any, **options: Any) -> Lion:
        """Returns a Lion over parameters on any device or without memory, whose updates a ``CpuStep`` runs.

        Its own ``step`` refuses such parameters. The arguments are those of the constructor.
        """
        items = list(params)
        groups = items if items and isinstance(items[0], dict) else [{"params": items}]
        made = cls([{**group, "params": [torch.zeros(1, requires_grad=True)]} for group in groups], **options)
        for group, given in zip(made.param_groups, groups, strict=True):
            group["params"] = list(given["params"])
        return made

"""Adam, AdamW, SGD and Adagrad with the semantics and options of ``torch.optim``, and Lion, each with its own rule."""

from __future__ import annotations

from typing import Any

import torch

from zero_optim_cpu.optimizer import CpuOptimizer
from zero_optim_cpu.rules import ADAGRAD, ADAM, ADAMW, LION, SGD_MOMENTUM


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
            raise ValueError(f"nesterov=True needs momentum and no dampening, not {momentum=}, {dampening=}")
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        defaults |= {"nesterov": nesterov, "maximize": maximize}
        super().__init__(params, defaults, **native)


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

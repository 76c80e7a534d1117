"""Trains on whole tensors in one process: the slow twin of sharded mixed precision training. No sharding, no hooks.

`Reference.step` computes the result of `shard` on N ranks from the N ranks' batches in turn. Tests compare every stage,
store and placement with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_core.precision import round_to


class Reference:
    """A dense model and its fp32 masters, trained on the mean gradient of several batches.

    model: unsharded, on one device; its parameters become param_dtype. build: makes the optimizer from the masters (in
    the order of model.parameters(); frozen ones too, whose gradients stay None).
    """

    def __init__(
        self,
        model: nn.Module,
        build: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        param_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self.model, self.max_grad_norm = model, max_grad_norm
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.parameters]
        self.optimizer = build(self.masters)
        self.grad_norm = 0.0
        for p in self.parameters:
            if param_dtype is not None:
                p.data = p.data.to(param_dtype)
        self._round()

    def _round(self) -> None:
        for p, master in zip(self.parameters, self.masters, strict=True):
            round_to(master.detach().view(-1), p.data.view(-1))

    def step(self, batches: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor]) -> list[float]:
        """Takes one step on one batch per rank; returns the loss of each. Gradients are summed in fp32 and averaged."""
        total: list[Tensor | None] = [None] * len(self.parameters)
        losses = []
        for batch in batches:
            value = loss(self.model, batch)
            value.backward()
            losses.append(float(value.detach()))
            for k, p in enumerate(self.parameters):
                if p.grad is not None:
                    so_far = total[k]
                    total[k] = p.grad.float() if so_far is None else so_far + p.grad.float()
                    p.grad = None
        for master, gradient in zip(self.masters, total, strict=True):
            master.grad = None if gradient is None else gradient / len(batches)
        squares = [m.grad.double().square().sum() for m in self.masters if m.grad is not None]
        self.grad_norm = float(torch.stack(squares).sum().sqrt())
        if self.max_grad_norm is not None:
            scale = min(1.0, self.max_grad_norm / (self.grad_norm + 1e-6))
            for master in self.masters:
                if master.grad is not None:
                    master.grad.mul_(scale)
        self.optimizer.step()
        self._round()
        return losses

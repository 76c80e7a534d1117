"""Blocks that run their module again inside backward, or a backward inside forward, by functions of the user's own."""

from typing import Any

import torch
from torch import Tensor, nn


class Adjoint(torch.autograd.Function):
    """Keeps only the input; backward runs the module again and asks autograd for the gradients of its parameters."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor, *parameters: nn.Parameter) -> Tensor:
        ctx.run, ctx.parameters = run, parameters
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            y = ctx.run(again)
        wanted = [again, *ctx.parameters]
        return None, *torch.autograd.grad(y, wanted, gradient, allow_unused=True)


def rerun(run: Any, module: nn.Module, x: Tensor) -> Tensor:
    """The module's output, `run(x)`, whose backward runs it again."""
    return Adjoint.apply(run, x, *(p for p in module.parameters() if p.requires_grad))


def forced(run: Any, x: Tensor, through: bool) -> Tensor:
    """x and the slope of an energy, as models of molecules have it: autograd.grad in a forward, under no_grad too.

    through: the slope is differentiated too when the model trains.
    """
    training = torch.is_grad_enabled()
    with torch.enable_grad():
        place = x if x.requires_grad and through else x.detach().requires_grad_()
        energy = run(place).square().sum()
        (slope,) = torch.autograd.grad(energy, place, create_graph=training and through)
    return x - 0.1 * slope

"""Trains with an optimizer of your own that needs whole matrices: SOAP (Vyas et al. 2024, arXiv 2409.11321).

python examples/soap.py

SOAP is Adam in the eigenbasis of Shampoo's preconditioner, here on any tier. Beside a plain torch optimizer it has two
methods for stores: which parameters may not be cut, and how much memory a step takes. Dry steps on the meta device find
its states. `tests/integration/zero_offload/test_soap.py` compares its bits on every tier with torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import zero_core
from zero_offload import MemoryByteStore, TieredStore

SIDES = ("left", "right")


class SOAP(torch.optim.Optimizer):
    """Steps matrices. A side longer than `max_side` is not rotated; bases are renewed every `frequency` steps."""

    def __init__(
        self,
        parameters: Any,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        frequency: int = 10,
        max_side: int = 10_000,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, {**options, "frequency": frequency, "max_side": max_side})

    def needs_uncut(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
        """Returns whether a parameter must not be cut, see zero_core.optim.uncut.NeedsUncut."""
        return len(shape) == 2

    def scratch_bytes(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> int:
        """Returns the most bytes that a step takes beside parameter, gradient and states, for the plan."""
        rows, columns = shape
        return 16 * rows * columns + 20 * max(rows, columns) ** 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    advance(parameter, parameter.grad, self.state[parameter], group)


def advance(parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """Takes one step. The first one only begins the preconditioner, as the authors do."""
    (beta1, beta2), eps = group["betas"], group["eps"]
    grams = {"left": gradient @ gradient.T, "right": gradient.T @ gradient}
    grams = {n: gram for n, gram in grams.items() if len(gram) <= group["max_side"]}
    if not state:
        state.update(step=torch.ones(()), exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        for name, gram in grams.items():
            state[name] = gram * (1 - beta2)
            state[f"{name}_basis"] = torch.linalg.eigh(state[name])[1].contiguous()  # stores keep no other strides
        return
    state["step"] += 1
    updates = float(state["step"]) - 1
    rotated = rotate(gradient, state)
    mean, square = state["exp_avg"].lerp_(gradient, 1 - beta1), state["exp_avg_sq"]
    square.lerp_(rotated.square(), 1 - beta2)
    root = (square / (1 - beta2**updates)).sqrt_().add_(eps)
    direction = rotate(rotate(mean, state).div_(root), state, back=True)
    parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.sub_(direction, alpha=group["lr"] / (1 - beta1**updates))
    for name, gram in grams.items():
        state[name].lerp_(gram, 1 - beta2)
        if state["step"] % group["frequency"] == 0:  # one step of the power iteration
            state[f"{name}_basis"].copy_(torch.linalg.qr(state[name] @ state[f"{name}_basis"])[0])


def rotate(values: Tensor, state: Mapping[str, Any], *, back: bool = False) -> Tensor:
    """Returns a copy of the matrix, rotated into the eigenbasis of each side that has one, or back."""
    left, right = (state.get(f"{name}_basis") for name in SIDES)
    if left is not None:
        values = (left if back else left.T) @ values
    if right is not None:
        values = values @ (right.T if back else right)
    return values.clone() if left is None and right is None else values


def trained(tiers: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64, bias=False), torch.nn.Tanh(), torch.nn.Linear(64, 1, bias=False))
    optimizer: torch.optim.Optimizer = SOAP(model.parameters(), lr=0.03, frequency=5)
    if tiers:
        store = TieredStore("nvme", "nvme", "nvme", nvme=MemoryByteStore())  # a zero_nvme.Slab on a real disk
        optimizer = zero_core.shard(model, optimizer, store=store)
    for step in range(60):
        inputs = torch.randn(32, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, 59):
            print(f"step {step + 1}: loss {loss.item():.3f}")
    if tiers:
        left = zero_core.full_state(model[0].weight, "left")
        assert left is not None
        print("the state left of the first matrix has shape", tuple(left.shape))
        zero_core.unshard(model)
    return [parameter.detach() for parameter in model.parameters()]


def main() -> None:
    plain, ours = trained(tiers=False), trained(tiers=True)
    print("the bits of plain torch:", all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True)))


if __name__ == "__main__":
    main()

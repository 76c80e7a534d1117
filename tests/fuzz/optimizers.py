"""Builds a program's optimizer: torch's, or one of the classes here, of which some look at more than one element."""

from typing import Any

import torch
from torch import Tensor, nn

import zero_core
from tests.fuzz.program import Optimizer


class Own(torch.optim.Optimizer):
    """A user's optimizer: `change` gives what is taken from a parameter."""

    optimizer_contract: str | None = "elementwise"

    def __init__(self, params: Any, lr: float = 0.03) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.change(p, p.grad, self.state[p]))
        return loss

    def change(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Soft(Own):
    """A soft sign of a momentum."""

    def change(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(0.9).add_(g, alpha=0.1)
        return momentum / (momentum.abs() + 0.1)


class Counting(Own):
    """Warms up over its own step count, a Python number."""

    def change(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        state["step"] = state.get("step", 0) + 1
        return g * min(1.0, state["step"] / 4)


class Slow(Own):
    """Pulls towards slow weights, which follow every second step."""

    def change(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        if "slow" not in state:
            state["slow"], state["step"] = p.detach().clone(), 0
        state["step"] += 1
        if state["step"] % 2 == 0:
            state["slow"].lerp_(p, 0.5)
        return g + 0.1 * (p - state["slow"])


# -- not elementwise: by themselves, or, where nothing is said, together ----------------------------------------------


class Rows(Own):
    """Normalises the rows of matrices."""

    optimizer_contract = "by itself"

    def change(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        return g / (g.norm(dim=-1, keepdim=True) + 0.1) if p.ndim > 1 else g


class Factors(Own):
    """Keeps second moments of rows and columns, of vectors whole ones."""

    optimizer_contract = "by itself"

    def change(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        square = g.square() + 1e-4
        if p.ndim < 2:
            return g / state.setdefault("square", torch.zeros_like(p)).mul_(0.9).add_(square, alpha=0.1).sqrt()
        rows = state.setdefault("rows", p.new_zeros(p.shape[0]))
        rows.mul_(0.9).add_(square.flatten(1).mean(1), alpha=0.1)
        return g / rows.sqrt().view(-1, *[1] * (p.ndim - 1))


class Noise(Own):
    """Langevin dynamics."""

    optimizer_contract = None

    def change(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        return g + 0.1 * torch.randn_like(p)


class Whole(Own):
    """Clips by the norm over all parameters itself."""

    optimizer_contract = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in found) ** 0.5
        for p in found:
            p.sub_(self.param_groups[0]["lr"] * p.grad / (norm + 0.1))


def _groups(model: nn.Module, how: str) -> Any:
    named = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
    parameters = [p for _, p in named]
    if how == "named":
        return named
    if how == "partial":
        return [p for k, p in enumerate(parameters) if k % 4 != 1] or parameters
    return _in_two(parameters, how, 1, 0.02)


def _in_two(parameters: list[nn.Parameter], how: str, ndim: int, lr: float) -> Any:
    """Two groups, if they are asked for; the second one's rate is `lr`."""
    if how not in ("two", "ndim"):
        return parameters
    first = [p for k, p in enumerate(parameters) if (p.ndim > ndim if how == "ndim" else k % 2 == 0)]
    rest = [p for p in parameters if all(p is not q for q in first)]
    return [group for group in ({"params": first}, {"params": rest, "lr": lr}) if group["params"]]


def _joint(spec: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Muon over matrices and what has a dimension more, which are stacks of them, with AdamW over the rest."""
    partial = spec.groups == "partial"
    named = [(n, p) for n, p in model.named_parameters() if p.is_floating_point()]
    named = [each for k, each in enumerate(named) if not (partial and k % 4 == 1)] or named
    inside = [(n, p) for n, p in named if p.ndim in (2, 3)]
    rest = [(n, p) for n, p in named if p.ndim not in (2, 3)]
    given: Any = [named_ones if spec.groups == "named" else [p for _, p in named_ones] for named_ones in (inside, rest)]
    if len(inside) > 1:
        given[0] = _in_two(given[0], spec.groups, 2, 0.01)
    made = [zero_core.Muon(given[0], **dict(spec.options))] if inside else []
    made += [torch.optim.AdamW(given[1], lr=0.02, eps=1e-2)] if rest else []  # type: ignore[list-item]
    return zero_core.JointOptimizer(*made) if len(made) > 1 else made[0]


def build_optimizer(spec: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """A fresh optimizer over the model's parameters, in the groups asked for."""
    if spec.name == "Joint":
        return _joint(spec, model)
    kind: Any = globals().get(spec.name) or getattr(torch.optim, spec.name)
    return kind(_groups(model, spec.groups), **dict(spec.options))

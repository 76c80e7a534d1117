"""Optimizers of the user's that need stacked experts whole, and say of rows that they are stepped apart, or not."""

import math
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("zero_optim_cpu")

import zero_core
import zero_optim_cpu
from tests import kit
from tests.chunks import small_chunks
from tests.integration.zero_core import mixtures
from tests.integration.zero_core.mixtures import GROUP, grouped, loss_of
from tests.integration.zero_offload.test_muon import STEPS, Run, apart, store_of
from tests.integration.zero_offload.test_muon_experts import number_of, steps
from zero_core.errors import UnsupportedOptimizerError

pytestmark = pytest.mark.promise("steps-rows")


class Scaled(torch.optim.Optimizer):
    """Moves each matrix of a stack by its momentum over a norm. `says`: what it says of rows."""

    def __init__(self, params: Any, lr: float = 0.02, says: bool = True) -> None:
        super().__init__(params, {"lr": lr, "says": says})

    def needs_uncut(self, group: Any, shape: tuple[int, ...]) -> bool:
        return True

    def steps_rows(self, group: Any, shape: tuple[int, ...]) -> bool:
        return bool(group["says"] and len(shape) == 3)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p.grad, 0.1)
                    axes = tuple(range(max(0, p.ndim - 2), p.ndim))
                    p.sub_(mean / (torch.linalg.vector_norm(mean, dim=axes, keepdim=True) + 1e-7), alpha=group["lr"])


class Shaped(Scaled):
    """Keeps a state of another shape than the parameter's."""

    needs_uncut = Scaled.needs_uncut  # of this step too

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["count"] = torch.ones(2, 2)


def beside(model: nn.Module, kind: Any, **options: Any) -> list[torch.optim.Optimizer]:
    stacks = [p for p in model.parameters() if p.ndim == 3]
    others = [p for p in model.parameters() if p.ndim != 3]
    return [kind(stacks, **options), zero_optim_cpu.AdamW(others, threads=1)]


CUT = "is needed whole, and its experts are cut into groups: give shard"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (Scaled, {"says": False}, CUT),
    (Shaped, {}, CUT),
]


@pytest.mark.parametrize("kind, options, told", REFUSED)
def test_rows_that_an_optimizer_does_not_step_apart_are_refused(kind: Any, options: dict[str, Any], told: str) -> None:
    model = mixtures.qwen()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(UnsupportedOptimizerError, match=told):
        zero_core.shard(model, beside(model, kind, **options), expert_bytes=GROUP)
    assert not apart({name: p.detach() for name, p in model.named_parameters()}, before)
    ways = [({**options, "says": False}, None), (options, None)]  # it does not say so, and experts are not cut
    for given, expert_bytes in ways:
        optimizer = zero_core.shard(model, beside(model, kind, **given), expert_bytes=expert_bytes)
        assert math.isfinite(steps(optimizer, model, 0, 1)[0])
        optimizer.close()
        model = mixtures.qwen()


@pytest.mark.parametrize("place", ["none", "nvme"])
def test_an_optimizer_of_the_users_may_step_rows_apart(place: str) -> None:
    model = mixtures.qwen()
    plain = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters() if p.ndim == 3}
    theirs = Scaled(plain.values())
    with small_chunks():
        optimizer = zero_core.shard(model, beside(model, Scaled), store=store_of(Run(place)), expert_bytes=GROUP)
        assert len(grouped(model)) == 8
        for step in range(STEPS):
            loss_of(model, number_of(step)).backward()
            for name, master in plain.items():
                master.grad = zero_core.full_gradient(model.get_parameter(name))
            theirs.step()
            optimizer.step()
            optimizer.zero_grad()
        assert not apart(kit.named_values(model), {name: p.detach() for name, p in plain.items()})
        optimizer.close()

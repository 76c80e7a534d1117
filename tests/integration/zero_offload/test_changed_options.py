"""Options that change during a run on tiers: the values of plain torch, or a refusal."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from zero_core.errors import UnsupportedOptimizerError
from zero_offload import TieredStore
from zero_offload.torch_step import TorchStep
from zero_optim_cpu import CpuStep

CHANGES = [
    ("SGD", {"momentum": 0.9}, [{"maximize": True}]),
    ("SGD", {"momentum": 0.9}, [{"momentum": 0.0}]),
    ("SGD", {"momentum": 0.9}, [{"nesterov": True}]),
    ("SGD", {"momentum": 0.9}, [{"dampening": 0.5}]),
    ("SGD", {"momentum": 0.9}, [{"weight_decay": 0.1, "foreach": True}]),
    ("SGD", {}, [{"maximize": True}]),
    ("Adam", {}, [{"maximize": True}]),
    ("Adam", {}, [{"betas": (0.0, 0.5), "eps": 1e-3}]),
    ("Adam", {"weight_decay": 0.1}, [{"decoupled_weight_decay": True, "fused": True}]),
    ("Adam", {}, [{"differentiable": True}]),
    ("AdamW", {"weight_decay": 0.1}, [{"maximize": True}]),
    ("AdamW", {"weight_decay": 0.1}, [{"decoupled_weight_decay": False}]),
    ("AdamW", {"weight_decay": 0.1}, [{"weight_decay": 0.0}]),
]
STEPS = {"TorchStep": lambda: TorchStep("fp32"), "CpuStep": lambda: CpuStep("fp32", threads=1)}


def trained(kind, given, changes, store=None):
    """The weights after nine steps; from the fourth on with the first change, from the seventh with the second."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **given)
    if store is not None:
        optimizer = zero_core.shard(model, optimizer, store=store)
    for step in range(9):
        if step in (3, 6) and len(changes) >= step // 3:
            optimizer.param_groups[0].update(changes[step // 3 - 1])
        kit.step(optimizer, model(torch.full((2, 4), step + 1.0)).square().sum().mul(0.001))
    with nullcontext() if store is None else zero_core.gathered(model):
        weights = model.weight.detach().clone()
    if store is not None:
        optimizer.close()
    return weights


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("kind", "given", "changes"), CHANGES)
def test_options_that_change_in_the_run_train_as_torch_does(step, kind, given, changes):
    wanted = trained(kind, given, changes)
    found = trained(kind, given, changes, TieredStore(step=STEPS[step]()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


OFF_AND_ON = [{"momentum": 0.0}, {"momentum": 0.5}]


@pytest.mark.parametrize("step", STEPS)
def test_momentum_that_was_off_for_a_while_goes_on_from_its_buffer(step):
    wanted = trained("SGD", {"momentum": 0.9}, OFF_AND_ON)
    found = trained("SGD", {"momentum": 0.9}, OFF_AND_ON, TieredStore(step=STEPS[step]()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


REFUSED = [
    ("SGD", {}, [{"momentum": 0.9}], r"momentum from 0 to 0.9 .* keeps momentum_buffer, .* no memory"),
    ("Adam", {}, [{"amsgrad": True}], r"amsgrad from False to True .* KeyError"),
    ("Adam", {}, [{"capturable": True}], r"capturable from False to True .* AssertionError"),
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("kind", "given", "changes", "named"), REFUSED)
def test_options_that_change_what_is_kept_are_refused_by_name(step, kind, given, changes, named):
    with pytest.raises(UnsupportedOptimizerError, match=f"param group 0 changed {named}"):
        trained(kind, given, changes, TieredStore(step=STEPS[step]()))


@pytest.mark.parametrize("step", STEPS)
def test_the_advice_for_a_momentum_that_comes_later(step):
    """Have it when `shard` is called, and set it to zero until it shall apply."""
    wanted = trained("SGD", {}, [{}, {"momentum": 0.9}])
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = zero_core.shard(model, optimizer, store=TieredStore(step=STEPS[step]()))
    for at in range(9):
        optimizer.param_groups[0]["momentum"] = 0.9 if at >= 6 else 0.0
        kit.step(optimizer, model(torch.full((2, 4), at + 1.0)).square().sum().mul(0.001))
    with zero_core.gathered(model):
        torch.testing.assert_close(model.weight.detach(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", STEPS)
def test_a_buffer_that_torch_does_not_begin_with_zeros_is_refused(step):
    """torch takes the first gradient undamped: where momentum is off until step three, stores would damp it."""

    def run(momenta, store):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
        if store is not None:
            optimizer = zero_core.shard(model, optimizer, store=store)
        for momentum in momenta:
            optimizer.param_groups[0]["momentum"] = momentum
            try:
                kit.step(optimizer, model(torch.ones(2, 4)).square().sum().mul(0.1))
            except UnsupportedOptimizerError as error:
                assert "does not begin momentum_buffer with zeros" in str(error)
                optimizer.param_groups[0]["momentum"] = 0.0  # set back, as is advised
                optimizer.step()
                optimizer.zero_grad()
        with nullcontext() if store is None else zero_core.gathered(model):
            return model.weight.detach().clone()

    found = run([0.0, 0.0, 0.9], TieredStore(step=STEPS[step]()))
    torch.testing.assert_close(found, run([0.0, 0.0, 0.0], None), rtol=1e-4, atol=1e-5)
    found = run([0.9, 0.0, 0.9], TieredStore(step=STEPS[step]()))
    torch.testing.assert_close(found, run([0.9, 0.0, 0.9], None), rtol=1e-4, atol=1e-5)

"""The probe of an `UpdateStep`: whether a changed option is the optimizer's."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

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


def test_a_step_of_the_user_that_does_not_know_an_option_is_refused():
    class Forgetful(TorchStep):
        """Has never heard of `maximize`."""

        def update(self, tile, segments, scale):
            known = [replace(s, options={**s.options, "maximize": False}) for s in segments]
            super().update(tile, known, scale)

    with pytest.raises(UnsupportedOptimizerError, match="maximize from False to True .* Forgetful does not go on as"):
        trained("SGD", {"momentum": 0.9}, [{"maximize": True}], TieredStore(step=Forgetful()))
    with pytest.raises(UnsupportedOptimizerError, match="TorchStep does not go on as SGD does"):  # the buffer is damped
        trained("SGD", {"momentum": 0.0, "dampening": 0.5}, [{"momentum": 0.9}], TieredStore(step=_with_buffer()))


def _with_buffer():
    """A TorchStep that was bound to an SGD with a buffer, as the group beside one without momentum has it."""

    class Bound(TorchStep):
        def bind(self, optimizer):
            super().bind(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9))

    Bound.__name__ = "TorchStep"
    return Bound()


@pytest.mark.parametrize("step", STEPS)
def test_a_change_that_is_refused_is_set_back_or_given_before_shard(step):
    def made(store, **changed):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        groups = [{"params": [model.weight], "momentum": 0.9}, {"params": [model.bias], "dampening": 0.5, **changed}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return model, optimizer if store is None else zero_core.shard(model, optimizer, store=store)

    def train(model, optimizer):
        kit.step(optimizer, model(torch.ones(2, 4)).square().sum().mul(0.1))

    def same(ours, plain):
        with zero_core.gathered(ours):
            torch.testing.assert_close(ours.bias.detach(), plain.bias.detach(), rtol=1e-4, atol=1e-5)

    (plain, theirs), (model, optimizer) = made(None), made(TieredStore(step=STEPS[step]()))
    train(plain, theirs)
    train(model, optimizer)
    optimizer.param_groups[1]["momentum"] = 0.9
    with pytest.raises(UnsupportedOptimizerError, match="Set it back; to train with the new value, give it to the opt"):
        train(model, optimizer)
    optimizer.param_groups[1]["momentum"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    train(plain, theirs)
    same(model, plain)
    (plain, theirs), (model, optimizer) = made(None, momentum=0.9), made(TieredStore(step=STEPS[step]()), momentum=0.9)
    for _ in range(3):
        train(plain, theirs)
        train(model, optimizer)
    same(model, plain)

"""Options that change during a run on tiers: by hand, and by torch's schedulers, built before and after shard()."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

pytest.importorskip("zero_optim_cpu")

import zero_core
from tests import kit
from zero_offload import TieredStore, TorchStep
from zero_optim_cpu import CpuStep

BUILT = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, 2),
    "CyclicLR without momentum": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, anneal_epochs=3),
    "LambdaLR of each group": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "LinearLR, then the last": lambda o: lr_scheduler.LinearLR(o, 0.5, 0.1, total_iters=3),
}


def trained(build, when):
    """when: None is plain torch; else where the scheduler is built, "before" or "after" shard()."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.005}]
    optimizer = torch.optim.RMSprop(groups, lr=0.01, momentum=0.5)
    scheduler = build(optimizer) if when != "after" else None
    if when is not None:
        optimizer = zero_core.shard(model, optimizer, store=TieredStore(optimizer="host"))
    scheduler = scheduler or build(optimizer)
    rates = []
    for step in range(6):
        loss = model(torch.linspace(-1, 1, 12).view(2, 6).roll(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append([group["lr"] for group in optimizer.param_groups])
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, rates


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", BUILT)
def test_a_schedulers_rates_are_those_of_plain_torch(name, when):
    wanted, rates = trained(BUILT[name], None)
    assert len({str(each) for each in rates}) > 1
    found, ours = trained(BUILT[name], when)
    assert ours == rates
    assert [key for key, value in wanted.items() if not torch.equal(found[key], value)] == []


CHANGES = [
    ("SGD", {"momentum": 0.9}, {"momentum": 0.5}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1}, {"dampening": 0.5}),
    ("SGD", {"momentum": 0.9}, {"weight_decay": 0.1, "foreach": True}),
    ("Adam", {}, {"betas": (0.1, 0.5), "eps": 1e-3}),
    ("Adam", {"weight_decay": 0.1}, {"lr": 0.0, "fused": True}),
    ("AdamW", {"weight_decay": 0.1}, {"weight_decay": 0.0}),
]
STEPS = {"TorchStep": lambda: TorchStep("fp32"), "CpuStep": lambda: CpuStep("fp32", threads=1)}


def changed(kind, given, change, store=None):
    """The weights after nine steps, from the fourth on with the change."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **given)
    if store is not None:
        optimizer = zero_core.shard(model, optimizer, store=store)
    for step in range(9):
        if step == 3:
            optimizer.param_groups[0].update(change)
        kit.step(optimizer, model(torch.full((2, 4), step + 1.0)).square().sum().mul(0.001))
    with nullcontext() if store is None else zero_core.gathered(model):
        weights = model.weight.detach().clone()
    if store is not None:
        optimizer.close()
    return weights


@pytest.mark.promise("changed-options")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("kind", "given", "change"), CHANGES)
def test_options_that_change_in_the_run_train_as_torch_does(step, kind, given, change):
    wanted = changed(kind, given, change)
    found = changed(kind, given, change, TieredStore(step=STEPS[step]()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

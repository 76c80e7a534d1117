"""Every scheduler of torch on an optimizer that steps each parameter by itself, built before and after shard()."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zero_core
from zero_offload import TieredStore

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

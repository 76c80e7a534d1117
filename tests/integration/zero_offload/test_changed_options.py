"""Options that change during a run on tiers: the values of plain torch."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

pytest.importorskip("zero_optim_cpu")

import zero_core
from tests import kit
from zero_offload import TieredStore
from zero_offload.torch_step import TorchStep
from zero_optim_cpu import CpuStep

CHANGES = [
    ("SGD", {"momentum": 0.9}, {"momentum": 0.5}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1}, {"dampening": 0.5}),
    ("SGD", {"momentum": 0.9}, {"weight_decay": 0.1, "foreach": True}),
    ("Adam", {}, {"betas": (0.1, 0.5), "eps": 1e-3}),
    ("Adam", {"weight_decay": 0.1}, {"lr": 0.0, "fused": True}),
    ("AdamW", {"weight_decay": 0.1}, {"weight_decay": 0.0}),
]
STEPS = {"TorchStep": lambda: TorchStep("fp32"), "CpuStep": lambda: CpuStep("fp32", threads=1)}


def trained(kind, given, change, store=None):
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
    wanted = trained(kind, given, change)
    found = trained(kind, given, change, TieredStore(step=STEPS[step]()))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)

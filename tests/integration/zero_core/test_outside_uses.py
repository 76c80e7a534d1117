"""Parameters read outside of any forward, with gradients enabled: between steps, in a penalty, in a parametrisation.

Each trains beside a dense twin and fails if a unit that is reduced twice in one backward loses a gradient.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import GradientError

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def plain():
    """No parameters of the root's own, so the first layer's unit is the last to be reduced."""
    return nn.Sequential(nn.Linear(5, toys.WIDTH), nn.Tanh(), nn.Linear(toys.WIDTH, 3))


def log_norms(model, step):
    for parameter in model.parameters():
        parameter.norm().item()  # with gradients enabled, as loggers do


def penalty_after(model, x):
    return toys.loss_of(model, x) + 0.01 * model[0].weight.square().sum()


def penalty_before(model, x):
    penalty = 0.01 * model[0].weight.square().sum() + 0.02 * model[2].bias.square().sum()
    return penalty + toys.loss_of(model, x)


def penalty_on_one_rank_only(model, x):
    """Both ranks read, so that the collectives match; one uses what it read."""
    penalty = model[2].weight.square().sum()
    scale = 0.01 if model is not model or float(x.sum()) > 0 else 0.0
    loss = toys.loss_of(model, x)
    return loss + scale * penalty if scale else loss


def normed():
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, toys.WIDTH)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(toys.WIDTH, toys.WIDTH)),
        nn.Linear(toys.WIDTH, 3),
    )


def run(make, options):
    toys.train(make, **options)


CASES = {
    "logger": (plain, {"before": log_norms}),
    "after": (plain, {"loss": penalty_after}),
    "before": (plain, {"loss": penalty_before}),
    "one rank": (plain, {"loss": penalty_on_one_rank_only}),
    "parametrised": (normed, {}),
    "accumulated": (plain, {"loss": penalty_before, "micro": 3}),
}


@STAGES
@pytest.mark.parametrize("case", CASES)
def test_parameters_used_outside_of_a_forward_lose_no_gradient(ranks, stage, case):
    make, options = CASES[case]
    ranks(2).run(run, make, {"stage": stage, **options})


@pytest.mark.parametrize("case", CASES)
def test_nor_on_one_rank(case):
    make, options = CASES[case]
    run(make, options)


@kit.on_ranks(1, 2)
def test_a_loss_without_any_forward():
    model, optimizer = kit.sharded(plain, toys.sgd)
    before = model[0].weight.detach().clone()
    kit.step(optimizer, model[0].weight.square().sum().mul(0.5))
    torch.testing.assert_close(model[0].weight.detach().clone(), before * 0.9)


@kit.on_ranks(1, 2)
def test_a_read_between_forward_and_backward_updates_nothing_twice():
    model, optimizer = kit.sharded(plain, toys.sgd, update_in_backward=True)
    loss = toys.loss_of(model, toys.data(0, 0))
    model[0].weight.norm().item()
    loss.backward()
    optimizer.step()
    assert optimizer.grad_norm > 0


@kit.on_ranks(1, 2)
def test_a_gradient_that_comes_after_its_update_in_backward_is_refused():
    model, optimizer = kit.sharded(plain, toys.sgd, update_in_backward=True)
    penalty = model[2].weight.square().sum()
    with pytest.raises(GradientError, match="a gradient reached unit .* a use outside of its module"):
        (penalty + toys.loss_of(model, toys.data(0, 0))).backward()
        optimizer.step()

"""An optimizer that has stepped, or was loaded, before shard(): its state goes on where it was."""

from __future__ import annotations

import copy

import pytest
import torch

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import UnsupportedOptimizerError, ZeroError

OPTIMIZERS = {
    "adamw": toys.adamw,
    "momentum": toys.sgd,
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def steps(model, optimizer, first, last):
    for step in range(first, last):
        kit.step(optimizer, toys.loss_of(model, toys.data(step, 0)))


def go_on(name, stage, reload):
    torch.manual_seed(toys.world()[0])  # rank 0's parameters and state are everybody's
    dense = toys.Unused()
    theirs = OPTIMIZERS[name](dense.parameters())
    steps(dense, theirs, 0, 3)
    model = copy.deepcopy(dense)
    optimizer = OPTIMIZERS[name](model.parameters())
    if reload:
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    else:
        optimizer.state.update(
            {
                p: copy.deepcopy(theirs.state[q])
                for p, q in zip(model.parameters(), dense.parameters(), strict=True)
                if q in theirs.state
            }
        )
    ours = zero_core.shard(model, optimizer, stage=stage)
    assert not optimizer.state, "its memory went to the store"
    if name != "momentum":
        assert ours.step_count == 3 and ours.engine.units[0].steps[0] == 3
    steps(model, ours, 3, 6)
    steps(dense, theirs, 3, 6)
    with zero_core.gathered(model):
        return [
            (p.detach().clone(), q.detach().clone())
            for p, q in zip(model.parameters(), dense.parameters(), strict=True)
        ]


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_goes_on_with_the_same_bits(name, reload):
    for ours, theirs in go_on(name, 3, reload):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("name", "stage"), [("nadam", 3), ("adamw", 2), ("momentum", 1), ("adagrad", 0)])
def test_two_ranks_go_on_from_rank_0(ranks, name, stage):
    (first, second) = ranks(2).run(go_on, name, stage, True)
    for (ours, theirs), (other, _) in zip(first, second, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # both ranks gave the same gradient
        assert torch.equal(ours, other)


@kit.on_ranks(1, 2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_optimizers_state_dict_loads_into_a_sharded_one(name):
    dense, model = kit.twins(toys.Stack)
    theirs = OPTIMIZERS[name](dense.parameters())
    ours = zero_core.shard(model, OPTIMIZERS[name](model.parameters()))
    steps(model, ours, 7, 8)
    steps(dense, theirs, 0, 3)
    model.load_state_dict(dense.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    steps(model, ours, 3, 6)
    steps(dense, theirs, 3, 6)
    with zero_core.gathered(model):
        torch.testing.assert_close(list(model.parameters()), list(dense.parameters()), rtol=1e-6, atol=1e-7)


@kit.on_ranks(2)
def test_ranks_of_different_steps_are_told():
    model = toys.Stack()
    optimizer = toys.adamw(model.parameters())
    steps(model, optimizer, 0, 1 + toys.world()[0])
    with pytest.raises(ZeroError, match="ranks bring optimizers of different steps"):
        zero_core.shard(model, optimizer)


def test_a_state_that_the_store_does_not_keep_is_named():
    model = toys.Stack()
    optimizer = toys.sgd(model.parameters())
    steps(model, optimizer, 0, 1)
    optimizer.state[model.head.bias]["projection"] = torch.zeros(7)
    with pytest.raises(UnsupportedOptimizerError, match=r"SGD brings 'projection' of head.bias, shape \(7,\)"):
        zero_core.shard(model, optimizer)


def test_gradients_from_before_are_not_lost_in_silence():
    model = toys.Stack()
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(ZeroError, match=r"parameters have gradients already \(embed.weight"):
        zero_core.shard(model, toys.sgd(model.parameters()))
    model.zero_grad()
    zero_core.shard(model, toys.sgd(model.parameters()))


class TrustRatio(torch.optim.SGD):
    """Steps as long as the parameter is: a slice steps differently."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * p.norm() * group["lr"])


class Rows(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["rows"] = torch.zeros(3)


def test_optimizers_of_the_users_own_are_tried_before_they_are_cut():
    for kind, complaint in (
        (TrustRatio, "of a parameter of shape"),
        (Rows, r"keeps 'rows' \(shape \(3,\)\)"),
    ):
        model = toys.Stack()
        with pytest.raises(UnsupportedOptimizerError, match=complaint):
            zero_core.shard(model, kind(model.parameters(), lr=0.1))


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_a_number_of_a_parameter_without_dimensions_is_no_tensor(name):
    model, dense = Scaled(), Scaled()
    ours, theirs = (getattr(torch.optim, name)(m.parameters(), lr=0.1) for m in (model, dense))
    for step in range(3):
        if step == 1:
            ours = zero_core.shard(model, ours)
        for each, optimizer in ((model, ours), (dense, theirs)):
            kit.step(optimizer, each(torch.ones(3)).sum())
    torch.testing.assert_close(model.state_dict()["scale"], dense.scale.detach())

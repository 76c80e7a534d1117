"""`p.grad = None` between backward and step, on some parameters: as torch has it, not counted and not stepped."""

from contextlib import nullcontext

import pytest
import torch

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import CollectiveError


def drop(model):
    for parameter in (model.blocks[1].up.weight, model.blocks[1].norm.bias, model.head.bias):
        assert parameter.grad is not None
        parameter.grad = None
        assert parameter.grad is None
    model.blocks[0].zero_grad()


@pytest.mark.promise("dropped-gradients")
@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@kit.on_ranks(1, 2)
def test_a_dropped_gradient_is_neither_counted_nor_stepped(stage, when, quiet):
    """Two backwards a step; some gradients are dropped after the first (the second counts) or after the last."""
    dense, theirs, model, ours = kit.pair(toys.Stack, toys.sgd, stage=stage, max_grad_norm=0.3)
    for step in range(3):
        for micro in range(2):
            for each in (dense, model):
                with zero_core.no_sync(model) if each is model and quiet and micro == 0 else nullcontext():
                    toys.loss_of(each, toys.data(2 * step + micro, 0)).backward()
                if when == micro:
                    drop(each)
        norm = torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.3)
        for each in (theirs, ours):
            each.step()
            each.zero_grad()
        assert abs(ours.grad_norm - float(norm)) <= 1e-5 * float(norm)
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)
    toys.loss_of(model, toys.data(0, 0)).backward()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    ours.step()
    assert ours.grad_norm == 0.0


@pytest.mark.promise("ranks-drop-differently")
@kit.on_ranks(2)
def test_ranks_that_drop_different_gradients_are_told():
    model, optimizer = kit.sharded(toys.Stack, toys.sgd)
    toys.loss_of(model, toys.data(0, 0)).backward()
    if toys.world()[0] == 1:
        model.head.bias.grad = None
    with pytest.raises(CollectiveError, match="did not call the same collectives"):
        optimizer.step()

"""What torch keeps of a gradient after step(), or zero_grad(set_to_none=False), is refused where it would matter."""

from __future__ import annotations

import pytest
from torch import nn

import zero_core
from tests.integration.zero_core import toys
from zero_core.errors import GradientError

SIZES = pytest.mark.parametrize("size", [1, 2])


def sharded(**options):
    model = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
    return model, zero_core.shard(model, toys.sgd(model.parameters()), **options)


def backward(model, *used):
    sum(model[k](toys.data(0, 0)).square().mean() for k in used).backward()


def step_twice():
    model, optimizer = sharded()
    backward(model, 0)
    optimizer.step()
    assert model[0].weight.grad is not None and model[1].weight.grad is None
    with pytest.raises(GradientError, match=r"of the last step\(\) were not zeroed \(that of 0.weight"):
        optimizer.step()
    backward(model, 1)
    with pytest.raises(GradientError, match="torch would add to them"):
        optimizer.step()
    model.zero_grad()
    assert model[0].weight.grad is None
    backward(model, 1)
    optimizer.step()
    assert optimizer.step_count == 2


@SIZES
def test_gradients_that_were_not_zeroed_are_refused(ranks, size):
    ranks(size).run(step_twice)


def leave_zeros():
    model, optimizer = sharded()
    backward(model, 0, 1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert model[1].weight.grad is not None
    backward(model, 0, 1)
    optimizer.step()  # all were reached: torch would do the same
    optimizer.zero_grad(set_to_none=False)
    backward(model, 0)
    with pytest.raises(GradientError, match="left gradients of zeros to parameters"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()


@SIZES
def test_gradients_of_zeros_are_refused_where_torch_would_step_them(ranks, size):
    ranks(size).run(leave_zeros)


def leave_zeros_of_what_was_updated():
    model, optimizer = sharded(update_in_backward=True)
    backward(model, 0, 1)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(GradientError, match=r"decay\. Leave set_to_none at True"):
        optimizer.step()


@SIZES
def test_gradients_of_zeros_are_refused_also_after_an_update_in_backward(ranks, size):
    ranks(size).run(leave_zeros_of_what_was_updated)

"""What torch keeps of a gradient after step(), or zero_grad(set_to_none=False), is refused where it would matter."""

import copy

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import GradientError

pytestmark = pytest.mark.promise("not-zeroed")


def sharded(**options):
    return kit.sharded(nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)]), toys.sgd, **options)


def backward(model, *used):
    sum(model[k](toys.data(0, 0)).square().mean() for k in used).backward()


@kit.on_ranks(1, 2)
def test_gradients_that_were_not_zeroed_are_refused():
    model, optimizer = sharded()
    backward(model, 0)
    optimizer.step()
    assert model[0].weight.grad is not None and model[1].weight.grad is None
    with pytest.raises(GradientError, match=r"of the last step\(\) were not zeroed \(that of 0.weight"):
        optimizer.step()
    backward(model, 1)
    with pytest.raises(GradientError, match=r"torch would step them again.*optimizer.zero_grad\(\) after each step"):
        optimizer.step()
    model.zero_grad()
    assert model[0].weight.grad is None
    backward(model, 1)
    optimizer.step()
    assert optimizer.step_count == 2


@kit.on_ranks(1, 2)
def test_gradients_of_zeros_are_refused_where_torch_would_step_them():
    model, optimizer = sharded()
    backward(model, 0, 1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert model[1].weight.grad is not None
    backward(model, 0, 1)
    optimizer.step()  # all were reached: torch would do the same
    optimizer.zero_grad(set_to_none=False)
    backward(model, 0)
    with pytest.raises(GradientError, match="left gradients of zero for \\d+ parameters"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model, 0)
    optimizer.step()


@kit.on_ranks(1, 2)
def test_gradients_of_zeros_are_refused_also_after_an_update_in_backward():
    model, optimizer = sharded(update_in_backward=True)
    backward(model, 0, 1)
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(GradientError, match=r"decay\. Leave set_to_none at True"):
        optimizer.step()


@kit.on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_outlive_a_checkpoint_that_is_loaded(stage, tmp_path):
    """Dropped, they would leave `step()` without effect. Plain torch's `load_state_dict` leaves p.grad alone."""
    model, optimizer = sharded(stage=stage)
    zero_core.checkpoint.save(tmp_path / "saved", model, optimizer)
    backward(model, 0, 1)
    kept = copy.deepcopy([zero_core.full_gradient(p) for p in model.parameters()])
    zero_core.checkpoint.load(tmp_path / "saved", model, optimizer)
    before = kit.values(model)
    optimizer.step()
    for now, was, gradient in zip(kit.values(model), before, kept, strict=True):
        torch.testing.assert_close(now, was - optimizer.param_groups[0]["lr"] * gradient)
    zero_core.checkpoint.load(tmp_path / "saved", model, optimizer)
    backward(model, 0)
    with pytest.raises(GradientError, match=r"of the last step\(\) were not zeroed"):
        optimizer.step()


@pytest.mark.promise("full-values")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_a_backward_left_half_done_is_refused_at_the_step(stage):
    """torch would step what had arrived of the unit, with the rest of an earlier micro-batch."""
    model, optimizer = kit.sharded(toys.Stack, toys.sgd, stage=stage)
    toys.loss_of(model, toys.data(0, 0)).backward()
    hook = model.blocks[0].up.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        toys.loss_of(model, toys.data(1, 0)).backward()
    hook.remove()
    toys.loss_of(model, toys.data(1, 0)).backward()  # also if the loop goes on
    with pytest.raises(GradientError, match=r"raised before the gradient of unit blocks.0 was complete.*Nothing was"):
        optimizer.step()
    with pytest.raises(GradientError, match="the gradient of blocks.0.down.weight .* repeat the backwards"):
        zero_core.full_gradient(model.blocks[0].down.weight)
    assert zero_core.full_gradient(model.head.weight) is not None
    optimizer.zero_grad()
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))
    assert optimizer.step_count == 1

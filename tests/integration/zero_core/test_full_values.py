"""Full gradients, masters and optimizer states of one parameter, read and overwritten between two steps.

Fails if a value that is read is not the one that step() uses, if one that is written is not what step() uses and clips
by, if reading changes anything, or if something that is not there is given as zeros.
"""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core import full_gradient, full_state, set_full_gradient, set_full_state
from zero_core.errors import ChangedParameterError, GradientError, ZeroError

pytestmark = pytest.mark.promise("full-values")

CLIP = 0.05


def twins(make=toys.Tied, build=toys.adamw, **options):
    """A dense model and its optimizer, and the same sharded."""
    return kit.pair(make, build, **options)


def both(model, dense):
    return zip(model.parameters(), dense.parameters(), strict=True)


def clipped_step(dense, theirs, ours):
    """The norm in double, as ours is: torch's clip_grad_norm_ adds fp32 squares."""
    norm = sum(float(p.grad.double().square().sum()) for p in dense.parameters() if p.grad is not None) ** 0.5
    for p in dense.parameters():
        if p.grad is not None:
            p.grad.mul_(min(1.0, CLIP / (norm + 1e-6)))
    for each in (theirs, ours):
        each.step()
        each.zero_grad()
    assert abs(ours.grad_norm - norm) <= 1e-12 * norm


def check_states(model, dense, theirs):
    for a, b in both(model, dense):
        assert torch.equal(full_state(a, "master"), b.detach())
        for name in ("exp_avg", "exp_avg_sq"):
            found, expected = full_state(a, name), theirs.state[b].get(name)
            assert (found is None) == (expected is None)
            assert found is None or torch.equal(found, expected)


def late(model, x):
    """A weight that is used outside of its module after the forward: its gradient comes after it was reduced."""
    return toys.loss_of(model, x) + model.blocks[1].up.weight.square().sum()


EDITS = {
    **{f"tied, stage {n}": (toys.Tied, toys.loss_of, {"stage": n}) for n in (0, 1, 2, 3)},
    **{f"routed, stage {n}": (partial(toys.Routed, 1), toys.loss_of, {"stage": n}) for n in (0, 1, 2, 3)},
    "late": (toys.Tied, late, {}),
    "scaled": (partial(toys.Stack, 1), toys.loss_of, {"loss_scale": 1024.0}),
}


@pytest.mark.parametrize("name", EDITS)
@kit.on_ranks(1, 2)
def test_gradients_are_those_of_plain_torch_and_edits_are_clipped_and_stepped(size, name):
    """Two backwards a step; every gradient is read, and overwritten with what plain torch's becomes.

    Bit for bit; but for the order in which the gradients of several ranks, or of several uses, are added.
    """
    make, loss, options = EDITS[name]
    dense, theirs, model, ours = twins(make, max_grad_norm=CLIP, **options)
    exact = {"rtol": 0.0, "atol": 0.0} if size == 1 and loss is not late else {"rtol": 1e-5, "atol": 1e-7}
    for step in range(2):
        with zero_core.no_sync(model) if step == 0 and loss is not late else nullcontext():
            toys.backward_both(model, dense, 2 * step, loss)
        toys.backward_both(model, dense, 2 * step + 1, loss)
        for a, b in both(model, dense):
            found = full_gradient(a)
            if b.grad is None:
                assert found is None
                continue
            torch.testing.assert_close(found, b.grad, **exact)
            set_full_gradient(a, b.grad.mul_(0.3).add_(0.01))
            assert torch.equal(full_gradient(a), b.grad)
        clipped_step(dense, theirs, ours)
        check_states(model, dense, theirs)


@kit.on_ranks(1, 2)
@pytest.mark.parametrize("stage", [1, 3])
def test_sixteen_bit_parameters_have_fp32_gradients_and_masters(stage):
    """bf16 parameters and gradients, fp32 masters: what is written keeps all its bits."""
    _, _, model, ours = twins(partial(toys.Stack, 1), stage=stage, param_dtype=torch.bfloat16)
    parameters = [*model.parameters()]
    for step in range(2):
        toys.loss_of(model, toys.data(step, toys.world()[0]).bfloat16()).backward()
        written = [full_gradient(p) for p in parameters]
        for p, gradient in zip(parameters, written, strict=True):
            assert gradient.dtype == torch.float32 and gradient.shape == p.shape
            set_full_gradient(p, gradient.mul_(0.3))
        assert all(torch.equal(full_gradient(p), gradient) for p, gradient in zip(parameters, written, strict=True))
        before = [full_state(p, "master") for p in parameters]
        norm = sum(float(gradient.double().square().sum()) for gradient in written) ** 0.5
        ours.step()
        assert abs(ours.grad_norm - norm) <= 1e-12 * norm
        ours.zero_grad()
        assert not any(torch.equal(full_state(p, "master"), old) for p, old in zip(parameters, before, strict=True))
    weight = model.head.weight
    set_full_state(weight, "master", torch.full((3, toys.WIDTH), 1.0 + 2.0**-12))
    assert torch.equal(full_state(weight, "master"), torch.full((3, toys.WIDTH), 1.0 + 2.0**-12))
    assert torch.equal(weight.detach(), torch.ones(3, toys.WIDTH, dtype=torch.bfloat16))


@kit.on_ranks(1, 2)
def test_states_and_masters_that_are_written_are_stepped():
    dense, theirs, model, ours = twins(partial(toys.Stack, 1), max_grad_norm=CLIP)
    for step in range(3):
        toys.backward_both(model, dense, step)
        for a, b in both(model, dense):
            set_full_gradient(a, b.grad)
        if step == 1:
            for a, b in both(model, dense):
                for name in ("exp_avg", "exp_avg_sq"):
                    set_full_state(a, name, theirs.state[b][name].mul_(0.25))
                with torch.no_grad():
                    set_full_state(a, "master", b.mul_(1.5))
                assert torch.equal(a.detach(), b.detach())
        clipped_step(dense, theirs, ours)
        check_states(model, dense, theirs)


@kit.on_ranks(2)
def test_ranks_that_write_different_values_are_told_by_the_step():
    rank = toys.world()[0]
    _, _, model, ours = twins()
    toys.loss_of(model, toys.data(0, rank)).backward()
    set_full_gradient(model.head.bias, torch.full((3,), float(rank)))
    with pytest.raises(ChangedParameterError, match="different values.*the gradient of head.bias"):
        ours.step()


@pytest.mark.advice("yet: call it after the first step()")
@pytest.mark.advice("call optimizer.zero_grad() after each step()")
@kit.on_ranks(1, 2)
def test_what_is_not_there_is_none_or_refused():
    """Where torch has None, and where it has zeros."""
    _, _, model, ours = twins(toys.Unused)
    weight, spare, skipped = model.head.weight, model.blocks[0].spare, model.blocks[2].up.weight
    assert full_gradient(weight) is None
    assert full_state(weight, "exp_avg") is None
    toys.loss_of(model, toys.data(0, toys.world()[0])).backward()
    assert [full_gradient(p) is None for p in (weight, spare, skipped)] == [False, True, True]
    for parameter in (spare, skipped):
        with pytest.raises(GradientError, match=r"has no gradient: .*between backward\(\) and step\(\)"):
            set_full_gradient(parameter, torch.zeros(parameter.shape))
    weight.grad = None
    assert full_gradient(weight) is None
    ours.step()
    for parameter in (weight, spare, skipped):
        assert full_state(parameter, "exp_avg") is None
        with pytest.raises(ZeroError, match=r"has taken no step and has no exp_avg yet: call it after the first step"):
            set_full_state(parameter, "exp_avg", torch.zeros(parameter.shape))
    assert full_state(model.head.bias, "exp_avg") is not None
    with pytest.raises(GradientError, match=r"step\(\) has used up the gradient of head.bias: .*zero_grad"):
        full_gradient(model.head.bias)
    ours.zero_grad(set_to_none=False)
    assert torch.equal(full_gradient(model.head.bias), torch.zeros(3))
    ours.zero_grad()
    assert full_gradient(model.head.bias) is None


def test_what_is_frozen_or_in_no_group():
    torch.manual_seed(0)
    model = toys.Frozen()
    groups = [p for name, p in model.named_parameters() if p.requires_grad and name != "head.bias"]
    zero_core.shard(model, toys.adamw(groups))
    toys.loss_of(model, toys.data(0, 0)).backward()
    frozen = model.blocks[1].up.weight
    assert full_gradient(frozen) is None
    assert full_state(frozen, "exp_avg") is None
    with pytest.raises(ZeroError, match=r"not trained and has no master: its values are parameter.detach\(\)"):
        full_state(frozen, "master")
    with pytest.raises(GradientError, match="stays in p.grad: use that. Or give the parameter to the optimizer before"):
        full_gradient(model.head.bias)
    assert model.head.bias.grad.count_nonzero() > 0


ASKING = {
    "full_gradient": full_gradient,
    "set_full_gradient": lambda p: set_full_gradient(p, torch.zeros(p.shape)),
    "p.grad": lambda p: p.grad.abs_(),
    "clipping": lambda p: nn.utils.clip_grad_norm_([p], 0.5),
}


@pytest.mark.parametrize("name", ASKING)
def test_update_in_backward_leaves_no_gradient(name):
    _, _, model, ours = twins(build=kit.sgd, update_in_backward=True)
    weight = model.head.weight
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(GradientError, match=r"frees gradients during backward. Change .*register_hook"):
        ASKING[name](weight)
    ours.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    before = weight.detach().clone()
    weight.register_hook(torch.zeros_like)  # as the error says
    kit.step(ours, toys.loss_of(model, toys.data(0, 0)))
    assert torch.equal(weight.detach(), before)


CALLS = {
    "full_gradient": full_gradient,
    "set_full_gradient": lambda p: set_full_gradient(p, torch.zeros(p.shape)),
    "full_state": lambda p: full_state(p, "master"),
    "set_full_state": lambda p: set_full_state(p, "master", torch.zeros(p.shape)),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_at_the_wrong_time_or_of_the_wrong_tensor(name):
    call = CALLS[name]
    _, _, model, ours = twins()
    for register in (model.blocks[1].register_forward_hook, model.head.weight.register_hook):
        hook = register(lambda *_: call(model.head.weight))
        with pytest.raises(ZeroError, match=rf"{name}\(\) of head.weight inside forward or backward: call it after"):
            toys.loss_of(model, toys.data(0, 0)).backward()
        hook.remove()
    with zero_core.gathered(model), pytest.raises(ZeroError, match=rf"{name}\(\) of .*gathered.*leave the with block"):
        call(model.head.weight)
    with pytest.raises(ZeroError, match=rf"{name}\(\) of a tensor .* give it one of model.parameters\(\) after"):
        call(nn.Parameter(torch.zeros(2)))


@pytest.mark.advice("and of a dtype that is not complex, on every rank")
def test_names_and_shapes_are_checked():
    _, _, model, _ = twins()
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(ZeroError, match=r"'step'\) of head.bias: the states .* are master, exp_avg, exp_avg_sq"):
        full_state(model.head.bias, "step")
    assert [steps for unit in zero_core.units(model) for steps in unit.steps] == [0] * len(list(model.parameters()))
    with pytest.raises(ZeroError, match=r"head.bias was .* shape \(1,\) .*: give values of shape \(3,\)"):
        set_full_gradient(model.head.bias, torch.zeros(1))
    with pytest.raises(ZeroError, match=r"of head.bias was .*complex64: give"):
        set_full_state(model.head.bias, "master", torch.zeros(3, dtype=torch.complex64))


@pytest.mark.parametrize("stage", [2, 3])
def test_reading_before_a_second_backward_leaves_its_graph_alone(stage):
    """The graph of create_graph=True holds unsharded parameters until the step."""
    dense, _, model, _ = twins(stage=stage)
    for each in (dense, model):
        loss = toys.loss_of(each, toys.data(0, 0))
        gradients = torch.autograd.grad(loss, [each.blocks[0].up.weight, each.blocks[1].up.weight], create_graph=True)
        if each is model:
            assert full_gradient(model.head.weight) is None
            assert torch.equal(full_state(model.head.weight, "master"), dense.head.weight)
        (loss + sum(gradient.square().sum() for gradient in gradients)).backward()
    toys.same_gradients(model, dense, rtol=0, atol=0)

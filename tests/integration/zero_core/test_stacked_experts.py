"""Stacked experts that are cut into groups, each a unit: the numbers, names and shapes are as in torch."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_core import mixtures, toys
from tests.integration.zero_core.mixtures import GROUP, STACKS, adamw, close, grouped, loss_of, made

pytestmark = pytest.mark.promise("experts-train")

NAME = f"{STACKS[1]}.gate_up_proj"


def test_groups_are_units_and_no_name_changes():
    dense, model, optimizer = made()
    assert grouped(model) == [f"{path}[{a}:{a + 4}]" for path in STACKS for a in range(0, 16, 4)]
    assert [(n, p.shape) for n, p in model.named_parameters()] == [(n, p.shape) for n, p in dense.named_parameters()]
    assert model.state_dict().keys() == dense.state_dict().keys()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


@pytest.mark.parametrize("stage, expert_bytes", [(3, None), (3, 1 << 30), (2, GROUP), (1, GROUP), (0, GROUP)])
def test_they_stay_with_their_block_where_nothing_is_to_be_cut(stage, expert_bytes):
    _, model, optimizer = made(stage=stage, expert_bytes=expert_bytes)
    assert not grouped(model)
    assert "forward" not in vars(model.get_submodule(STACKS[0]))


# Options of shard(), micro-batches a step, the norm to clip to, and what else is done.
WAYS = {
    "plain": ({}, 1, None, ""),
    "nothing ahead": ({"prefetch_bytes": 0}, 1, None, ""),
    "all ahead, resident": ({"prefetch_bytes": 1 << 30, "resident_bytes": 200_000}, 1, None, ""),
    "clipped": ({}, 1, 0.05, ""),
    "accumulated": ({}, 2, None, ""),
    "no_sync": ({}, 3, None, "no_sync"),
    "in backward": ({"update_in_backward": True}, 1, None, ""),
    "recomputed": ({}, 1, None, "recompute"),
}


@pytest.mark.parametrize("way", WAYS)
@kit.on_ranks(1, 2)
def test_training_is_plain_torchs(way):
    options, accumulate, norm, also = WAYS[way]
    dense, model, optimizer = made(max_grad_norm=norm, **options)
    if also == "recompute":
        model.gradient_checkpointing_enable()
        model.train()
    gradients = mixtures.trained_plainly(dense, norm=norm, accumulate=accumulate)
    for step in range(3):
        for micro in range(accumulate):
            with zero_core.no_sync(model) if also == "no_sync" and micro + 1 < accumulate else nullcontext():
                loss_of(model, mixtures.share(step * accumulate + micro)[0]).backward()
        if not step and not options.get("update_in_backward"):
            for name, parameter in model.named_parameters():
                close(zero_core.full_gradient(parameter), gradients[name])
        optimizer.step()
        optimizer.zero_grad()
    mixtures.assert_same_values(model, dense)


def both(size=1):
    """The stacked parameter of a plain model and of a sharded one, after a backward in each."""
    dense, model, optimizer = made()
    for number in mixtures.share(0)[1]:
        (loss_of(dense, number) / size).backward()
    loss_of(model, mixtures.share(0)[0]).backward()
    return dense, model, optimizer, dense.get_parameter(NAME), model.get_parameter(NAME)


@kit.on_ranks(1, 2)
def test_its_gradient_is_read_multiplied_edited_and_dropped(size):
    """It arrives from outside of its groups too: from a penalty on the weights, in the loss and after it."""
    dense, model, optimizer, plain, cut = both(size)
    for each, net in ((plain, dense), (cut, model)):
        ((loss_of(net, 0) + each.square().sum()) / 9).backward()
        each[3].sum().mul(0.1).backward()
    close(cut.grad + 0, plain.grad)
    assert cut.grad.shape == plain.shape
    close(cut.grad[3], plain.grad[3])
    close(cut.grad.norm(), plain.grad.norm())
    close(cut.grad.abs().max(), plain.grad.abs().max())
    close(nn.utils.clip_grad_norm_(model.parameters(), 0.01), nn.utils.clip_grad_norm_(dense.parameters(), 0.01))
    for each in (cut, plain):
        each.grad.mul_(2.0)
        each.grad.clamp_(-1e-4, 1e-4)
    close(zero_core.full_gradient(cut), plain.grad, 0.1)
    for each in (cut, plain):
        each.grad[2] += 0.5
    zero_core.set_full_gradient(cut, zero_core.full_gradient(cut) * 3)
    plain.grad *= 3
    close(zero_core.full_gradient(cut), plain.grad)
    other = f"{STACKS[0]}.down_proj"
    dense.get_parameter(other).grad = model.get_parameter(other).grad = None
    assert model.get_parameter(other).grad is None
    optimizer.step()
    adamw(dense.parameters()).step()
    mixtures.assert_same_values(model, dense)


@kit.on_ranks(1, 2)
def test_its_states_and_master_are_read_and_written(size):
    dense, model, optimizer, plain, cut = both(size)
    torch_optimizer = adamw(dense.parameters())
    torch_optimizer.step()
    assert zero_core.full_state(cut, "exp_avg") is None
    optimizer.step()
    optimizer.zero_grad()
    state = torch_optimizer.state[plain]
    close(zero_core.full_state(cut, "exp_avg"), state["exp_avg"])
    close(zero_core.full_state(cut, "master"), plain.detach(), 10)
    zero_core.set_full_state(cut, "exp_avg_sq", torch.full_like(plain, 0.25))
    assert zero_core.full_state(cut, "exp_avg_sq").eq(0.25).all()
    zero_core.set_full_state(cut, "master", torch.arange(plain.numel()).view(plain.shape).float())
    assert cut.detach().flatten()[-1] == plain.numel() - 1
    with pytest.raises(zero_core.ZeroError, match=r"gate_up_proj was .* shape \(4, 64, 64\) .* shape \(16, 64, 64\)"):
        zero_core.set_full_state(cut, "master", torch.zeros(4, 64, 64))


@kit.on_ranks(1, 2)
def test_it_is_read_written_and_gathered_outside_of_its_groups(size):
    dense, model, optimizer, plain, cut = both(size)
    optimizer.zero_grad()
    with torch.no_grad():
        assert torch.equal(cut.detach() + 0, plain)
        assert torch.equal(cut[5], plain[5])
        for each in (plain, cut):
            each.mul_(1.5)
            each[7].fill_(0.125)
            each.data[8] += 1.0
            each.copy_(each * 2)
        assert torch.equal(cut + 0, plain)
        cut.data = plain.data = torch.full_like(plain, 0.01)
        assert torch.equal(cut + 0, plain)
    for master in (False, True):
        with zero_core.gathered(model, master=master), torch.no_grad():
            assert type(cut) is nn.Parameter and torch.equal(cut, plain)
            cut[4].fill_(0.5)
            plain[4].fill_(0.5)
            loss = loss_of(model, 0)
        close(loss, loss_of(dense, 0).detach())
        with torch.no_grad():
            assert torch.equal(cut + 0, plain)
    with pytest.raises(KeyError), zero_core.gathered(model), torch.no_grad():
        cut.zero_()
        raise KeyError
    close(loss_of(model, 0).detach(), loss_of(dense, 0).detach())


def test_torchs_autograd_functions_take_it():
    dense, model, optimizer = made()
    found, wanted = (
        torch.autograd.grad(loss_of(net, 0), [net.get_parameter(NAME), net.lm_head.weight]) for net in (model, dense)
    )
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs)
    other = model.get_parameter(f"{STACKS[0]}.down_proj")
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(model.get_parameter(NAME).sum(), [other])
    assert torch.autograd.grad(model.get_parameter(NAME).sum(), [other], allow_unused=True) == (None,)
    assert torch.autograd.grad(other.sum(), other, materialize_grads=True)[0].eq(1).all()
    torch.autograd.backward(loss_of(model, 0), inputs=[other])
    loss_of(dense, 0).backward()
    close(zero_core.full_gradient(other), dense.get_parameter(f"{STACKS[0]}.down_proj").grad)
    assert zero_core.full_gradient(model.get_parameter(NAME)) is None


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30])
@kit.on_ranks(1, 2)
def test_without_gradients_only_groups_that_some_rank_routes_to_are_asked_for(prefetch_bytes):
    store = toys.Noting()
    dense, model, optimizer = made(store=store, prefetch_bytes=prefetch_bytes)
    everything = set(store.names)
    groups = set(grouped(model))
    for number in range(4):
        mine, numbers = mixtures.share(number)
        routed = set()
        for path in STACKS:
            experts = dense.get_submodule(path)

            def note(module, args, path=path, routed=routed):
                routed |= {f"{path}[{e // 4 * 4}:{e // 4 * 4 + 4}]" for e in args[1].flatten().tolist()}

            handle = experts.register_forward_pre_hook(note)
            for each in numbers:
                with torch.no_grad():
                    dense(input_ids=mixtures.batch(each)[:1, :1], use_cache=False)
            handle.remove()
        store.asked.clear()
        with torch.no_grad():
            found = model(input_ids=mixtures.batch(mine)[:1, :1], use_cache=False).logits
            close(found, dense(input_ids=mixtures.batch(mine)[:1, :1], use_cache=False).logits)
        assert store.asked == everything - groups | routed, number
        assert routed != groups
    kit.step(optimizer, loss_of(model, mixtures.share(0)[0]))
    assert all(all(unit.steps) for unit in zero_core.units(model))


def test_a_gradient_that_is_given_in_gathered_is_cut_and_stepped():
    _, model, optimizer = made()
    parameter = model.get_parameter(NAME)
    for error in (ArithmeticError, None):
        with pytest.raises(error) if error else nullcontext(), zero_core.gathered(model):
            parameter.grad = torch.ones(parameter.shape)
            if error:
                raise error
        if error:
            optimizer.zero_grad()
            assert parameter.grad is None and zero_core.full_gradient(parameter) is None
    assert torch.equal(zero_core.full_gradient(parameter), parameter.grad.clone())
    assert torch.equal(parameter.grad.clone(), torch.ones(parameter.shape))

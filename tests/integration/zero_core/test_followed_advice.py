"""What errors of `with` blocks and gradients advise: each test makes the mistake, follows the advice, and that works.

Those of an optimizer are in test_followed_optimizer.py, those of parameters and models in test_followed_model.py, and
those of building, sharding and loading a model in test_followed_building.py and test_followed_checkpoints.py.
"""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

import zero_core
from tests import kit
from tests.following import X, adamw, advised, backward, model, same, sgd, sharded, step
from zero_core import checkpoint, full_gradient, set_full_gradient
from zero_core.optim.device_store import DeviceStore

# ---- with blocks -----------------------------------------------------------------------------------------------------


def test_averages_are_updated_after_the_with_block():
    net, _ = sharded()
    averages = zero_core.AveragedModel(net)
    averages.update_parameters()
    with averages.swapped_in(), advised("the averages are swapped in: leave the with block first"):
        averages.update_parameters()
    averages.update_parameters()
    assert averages.n_averaged == 2


def test_what_a_with_block_refuses_is_done_after_it():
    net, optimizer = sharded()
    backward(net)
    with zero_core.gathered(net):
        for call in (partial(full_gradient, net[0].weight), optimizer.step, optimizer.full_state_dict):
            with advised("leave the with block first"):
                call()
    assert full_gradient(net[0].weight) is not None
    optimizer.step()
    optimizer.full_state_dict()


@pytest.mark.parametrize("call", [zero_core.gathered, zero_core.handle])
def test_a_model_is_sharded_first(call):
    net = model()
    with advised("call zero_core.shard"):
        found = call(net)
        found.__enter__()
    zero_core.shard(net, adamw(net))
    found = call(net)
    if hasattr(found, "__enter__"):
        with found:
            pass


def _alone():
    from zero_core.comm import patience

    net, _ = sharded()
    if dist.get_rank() == 0:
        told = advised("Call it on every rank, outside of `if rank == 0`, and let rank 0 save what it returns")
        with mock.patch.object(patience, "SECONDS", 0.05), told:
            net.state_dict()
    dist.barrier()
    same(net, model())


def _writes(folder):
    net, optimizer = sharded()
    checkpoint.save(folder / "whole", net, optimizer)
    zero_core.save_pretrained(net, folder / "weights")
    zero_core.load_pretrained(net, folder / "weights")


def _added():
    def added(net):
        net[2].register_parameter("scale", nn.Parameter(torch.ones(1)))
        return net

    net, optimizer = sharded()
    added(net)
    with advised("Add it before shard", "or freeze it with requires_grad_(False), or run it under torch.no_grad()"):
        net[2](X)
    with torch.no_grad():
        net[2](X)
    net[2].scale.requires_grad_(False)
    step(net, optimizer)
    net = added(model())
    step(net, zero_core.shard(net, adamw(net)))


def test_ranks_that_differ_do_what_is_advised(ranks, tmp_path):
    for function in (_alone, _added):
        ranks(2).run(function)
    ranks(2).run(_writes, tmp_path)


def test_a_plain_optimizer_in_gathered_gets_gradients_of_its_own():
    plain, (net, optimizer) = model(), sharded(sgd)
    other = sgd(net)
    backward(net)
    with zero_core.gathered(net), advised("Call step() of the optimizer that zero_core.shard returned, outside of"):
        other.step()
    optimizer.step()
    step(plain, sgd(plain))
    same(net, plain)
    net, optimizer = sharded(sgd)
    gradients = torch.autograd.grad(net(X).sum(), list(net.parameters()))
    with zero_core.gathered(net):
        for p, gradient in zip(net.parameters(), gradients, strict=True):
            p.grad = gradient
        sgd(net).step()
        for p in net.parameters():
            p.grad = None
    same(net, plain)


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_a_hook_that_would_find_no_gradient_is_put_on_outside():
    def seen(parameter):
        found.append(parameter.grad.clone())

    found = []
    for before in (False, True):
        net = model()
        if before:
            net[0].weight.register_post_accumulate_grad_hook(seen)
        optimizer = zero_core.shard(net, adamw(net))
        if not before:
            with zero_core.gathered(net):
                handle = net[0].weight.register_post_accumulate_grad_hook(seen)
            with advised("Put it on outside of both, before or after zero_core.shard"):
                backward(net)
            handle.remove()
            optimizer.zero_grad()
            net[0].weight.register_post_accumulate_grad_hook(seen)
        backward(net)
    assert len(found) == 2 and torch.equal(*found)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_is_dense(kind):
    def made(sparse):
        net = kind(3, 4, sparse=sparse)
        return net, zero_core.shard(net, sgd(net))

    rows = torch.tensor([[0, 1]])
    with advised("build the module with sparse=False (nn.Embedding, nn.EmbeddingBag)"):
        made(True)[0](rows).sum().backward()
    net, optimizer = made(False)
    kit.step(optimizer, net(rows).sum())


def test_a_store_is_given_all_that_is_called():
    class Plain:
        def __init__(self):
            self.store = DeviceStore()

        def __getattr__(self, name):
            if name in ("read_gradient", "write_gradient"):
                raise AttributeError(name)
            return getattr(self.store, name)

    class Whole(Plain):
        def read_gradient(self, i, start, stop):
            return self.store.read_gradient(i, start, stop)

        def write_gradient(self, i, start, values):
            self.store.write_gradient(i, start, values)

    with advised("a Plain, lacks read_gradient, write_gradient: give it all that zero_core.ShardStore has"):
        sharded(store=Plain())
    net, _ = sharded(store=Whole())
    backward(net)
    plain = model()
    backward(plain)
    assert torch.equal(full_gradient(net[0].weight), plain[0].weight.grad)


def test_a_parameter_in_no_group_is_given_to_the_optimizer():
    net = model()
    zero_core.shard(net, torch.optim.SGD(net[0].parameters(), lr=0.1))
    backward(net)
    with advised("give it to the optimizer before zero_core.shard"):
        full_gradient(net[2].weight)
    net, _ = sharded()
    backward(net)
    assert full_gradient(net[2].weight) is not None


@pytest.mark.parametrize("ask", [full_gradient, lambda p: p.grad.abs_()])
def test_a_gradient_is_asked_for_between_backward_and_step(ask):
    net, optimizer = sharded()
    backward(net)
    optimizer.step()
    with advised("call optimizer.zero_grad() after each step()"):
        ask(net[0].weight)
    optimizer.zero_grad()
    backward(net)
    ask(net[0].weight)


def test_backwards_are_repeated_after_one_that_raised():
    net, optimizer = sharded()
    hook = net[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(net)
    hook.remove()
    with advised("call optimizer.zero_grad() and repeat the backwards of this step"):
        full_gradient(net[0].bias)
    optimizer.zero_grad()
    backward(net)
    assert full_gradient(net[0].bias) is not None
    optimizer.step()


def test_old_gradients_and_views_are_asked_for_again_or_copied():
    net, optimizer = sharded()
    backward(net)
    weight = net[0].weight
    gradient, kept, view, stays = weight.grad, weight.grad.clone(), weight.grad[0], weight.grad[0].clone()
    weight.grad.mul_(0.5)
    with advised("Take a new view, or clone() what is to stay"):
        view.sum()
    assert torch.equal(weight.grad[0], stays / 2)
    with advised("write p.grad.copy_(tensor), or zero_core.set_full_gradient(p, tensor)"):
        weight.grad.data = kept
    weight.grad.copy_(kept)
    set_full_gradient(weight, kept)
    with advised("on a held gradient, which has no memory: use zero_core.full_gradient(parameter)"):
        gradient.set_(kept)
    assert torch.equal(full_gradient(weight), kept)
    optimizer.step()
    optimizer.zero_grad()
    backward(net)
    with advised("Ask for p.grad again after backward(), or keep a copy, p.grad.clone()"):
        gradient.sum()
    assert weight.grad.sum() is not None and kept.sum() is not None


class Quantiser(nn.Module):
    """A table that an optimizer of its own steps inside of the forward."""

    def __init__(self, way):
        super().__init__()
        self.table = nn.Parameter(torch.arange(8.0).view(2, 4) / 8)
        self.own, self.way = torch.optim.SGD([self.table], lr=0.1), way

    def forward(self, x):
        loss = (self.table - x.detach().mean(0)).square().sum()
        if self.way == "backward":
            loss.backward()
        elif self.way == "grad":
            (self.table.grad,) = torch.autograd.grad(loss, self.table)
        if self.way != "after":
            self.own.step()
            self.own.zero_grad()
        self.loss = loss
        return x @ self.table.T


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_inside_of_a_forward_is_taken_by_grad_or_comes_after_it(stage):
    def train(way, stage=None, backwards=1):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), Quantiser(way))
        optimizer = sgd(net) if stage is None else zero_core.shard(net, sgd(net), stage=stage)
        for _ in range(3):
            for _ in range(backwards):
                net(X).sum().backward()
            if way == "after":
                net[1].loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in net.state_dict().items()}

    with advised(
        "Call zero_grad() before this forward, or backward() after it",
        "or take the gradients inside of it with torch.autograd.grad(), and set p.grad for an optimizer there",
    ):
        train("backward", stage, backwards=2)
    torch.testing.assert_close(train("backward", stage), train("backward"))
    torch.testing.assert_close(train("grad", stage), train("backward"))
    torch.testing.assert_close(train("after", stage), train("after"))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_in_another_dtype_are_reduced_in_it(stage):
    plain, net = model().bfloat16(), model().bfloat16()
    for parameter in (*plain.parameters(), net[0].weight):
        parameter.grad_dtype = torch.float32
    with advised("Pass reduce_dtype= to zero_core.shard for", "read them with zero_core.full_gradient(p), in fp32"):
        zero_core.shard(net, adamw(net), stage=stage)
    net[0].weight.grad_dtype = torch.bfloat16
    zero_core.shard(net, adamw(net), stage=stage, reduce_dtype=torch.float32)
    for scale in (1.0, 0.3, 0.01):
        for each in (plain, net):
            (each(X.bfloat16()).sum() * scale).backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert theirs.grad.dtype == torch.float32 and torch.equal(full_gradient(ours), theirs.grad)


def test_an_optimizer_in_backward_is_an_option_of_shard():
    plain, net, other = model(), model(), model()
    _apply_optimizer_in_backward(torch.optim.SGD, plain.parameters(), {"lr": 0.1})
    _apply_optimizer_in_backward(torch.optim.SGD, other.parameters(), {"lr": 0.1})
    with advised("Leave it out, and pass update_in_backward=True to zero_core.shard"):
        zero_core.shard(other, sgd(other))
    optimizer = zero_core.shard(net, sgd(net), update_in_backward=True)
    for _ in range(2):
        for each in (plain, net):
            each(X).sum().backward()
        optimizer.step()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().clone(), theirs.detach())


def test_a_gradient_is_zeroed_by_the_optimizer():
    net, optimizer = sharded()
    backward(net)
    gradient = net[0].weight.grad
    with advised("call optimizer.zero_grad(), which forgets it"):
        gradient.zero_()
    optimizer.zero_grad()
    backward(net)
    optimizer.step()


@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_loss_scale_takes_the_place_of_a_grad_scaler(scale):
    net, optimizer = sharded(sgd, loss_scale=scale)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(X).sum()).backward()
    advice = 'pass loss_scale="dynamic" to zero_core.shard, and leave' if scale is None else "leave the GradScaler out"
    with advised(advice):
        scaler.step(optimizer)
    step(*sharded(sgd, loss_scale="dynamic"))

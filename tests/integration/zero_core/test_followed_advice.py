"""What errors of a sharded model in use advise: each test makes the mistake, follows the advice, and that works.

Those of building, sharding and loading a model are in test_followed_building.py.
"""

from __future__ import annotations

import copy
import os
import pickle
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_core
from tests.integration.zero_core import test_parts as parts
from tests.unit.test_followed_advice import adamw, advised, backward, model, step
from zero_core import checkpoint, full_gradient, full_state, set_full_gradient, set_full_state
from zero_core.optim.device_store import DeviceStore
from zero_offload import MemoryByteStore

X = torch.ones(2, 4)


def sgd(net):
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)


def sharded(make=adamw, **options):
    net = model()
    return net, zero_core.shard(net, make(net), **options)


def same(net, other):
    ours, theirs = net.state_dict(), other.state_dict()
    assert all(torch.allclose(value, theirs[name], atol=1e-6) for name, value in ours.items())


# ---- with blocks -----------------------------------------------------------------------------------------------------


def test_averages_are_updated_after_the_with_block():
    net, _ = sharded()
    averages = zero_core.AveragedModel(net)
    averages.update_parameters()
    with averages.swapped_in(), advised("the averages are swapped in: leave the with block first"):
        averages.update_parameters()
    averages.update_parameters()
    assert averages.n_averaged == 2


@pytest.mark.parametrize("block", [zero_core.uneven, zero_core.gathered])
def test_what_a_with_block_refuses_is_done_after_it(block):
    net, optimizer = sharded()
    backward(net)
    with block(net):
        for call in (partial(full_gradient, net[0].weight), optimizer.step, optimizer.full_state_dict):
            with advised("leave the with block first"):
                call()
    assert full_gradient(net[0].weight) is not None
    optimizer.step()
    optimizer.full_state_dict()


def test_inside_uneven_a_forward_has_no_gradients_and_a_backward_comes_after():
    net, optimizer = sharded()
    loss = net(X).sum()
    with zero_core.uneven(net):
        with advised("run it under torch.no_grad() or inference_mode(), or outside of the with block"):
            net(X)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                net(X)
        with advised("backward() inside zero_core.uneven, where ranks may differ: leave the with block first"):
            loss.backward()
    net(X).sum().backward()
    optimizer.step()


def test_gathered_is_opened_around_uneven():
    net, _ = sharded()
    with zero_core.uneven(net), advised("open it around that block"), zero_core.gathered(net):
        pass
    with zero_core.gathered(net), zero_core.uneven(net), torch.no_grad():
        expected = net(X)
    assert torch.equal(net(X).detach(), expected)


def test_uneven_is_opened_around_the_call():
    net, _ = sharded()
    hook = net[0].register_forward_hook(lambda *_: zero_core.uneven(net).__enter__())
    with advised("zero_core.uneven inside forward or backward: open it around the call of the model"):
        net(X)
    hook.remove()
    with zero_core.uneven(net), torch.no_grad():
        net(X)


@pytest.mark.parametrize("call", [zero_core.gathered, zero_core.uneven, zero_core.handle])
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


def _names_all():
    nets = [model(), model()]
    for net in nets:
        zero_core.shard(net, adamw(net))
    with torch.no_grad():
        with advised("name all, zero_core.uneven(a, b)"), zero_core.uneven(nets[0]):
            nets[1](X)
        with zero_core.uneven(*nets):
            nets[1](X)


def _gathered_around():
    net, optimizer = sharded()
    with zero_core.gathered(net), zero_core.uneven(net), torch.no_grad():
        for _ in range(dist.get_rank() * 2):
            found = net(X)
    expected = net(X).detach()
    assert not dist.get_rank() or torch.equal(found, expected)
    step(net, optimizer)


def _alone():
    from zero_core.comm import patience

    net, _ = sharded()
    seconds, patience.SECONDS = patience.SECONDS, 0.05
    try:
        if dist.get_rank() == 0:
            with advised("Call it on every rank, outside of `if rank == 0`, and let rank 0 save what it returns"):
                net.state_dict()
    finally:
        patience.SECONDS = seconds
    dist.barrier()
    same(net, model())


def _writes(folder):
    net, optimizer = sharded()
    checkpoint.save(folder / "whole", net, optimizer)
    zero_core.save_pretrained(net, folder / "weights")
    zero_core.load_pretrained(net, folder / "weights")


def test_ranks_that_differ_do_what_is_advised(ranks, tmp_path):
    for function in (_names_all, _gathered_around, _alone, _added):
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


# ---- the optimizer ---------------------------------------------------------------------------------------------------


def inside(net, call, where):
    """Call it in a forward or in a backward."""
    if where == "forward":
        hook = net[0].register_forward_hook(lambda *_: call())
    else:
        hook = net[0].weight.register_hook(lambda _: call())
    try:
        backward(net)
    finally:
        hook.remove()


CALLS = {
    "step": lambda net, optimizer: optimizer.step(),
    "full_state_dict": lambda net, optimizer: optimizer.full_state_dict(),
    "full_gradient": lambda net, optimizer: full_gradient(net[0].weight),
}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("call", CALLS)
def test_what_a_pass_refuses_is_called_after_backward(call, where):
    net, optimizer = sharded()
    with advised("inside forward or backward: call it after loss.backward() returned"):
        inside(net, lambda: CALLS[call](net, optimizer), where)
    optimizer.zero_grad()
    backward(net)
    CALLS[call](net, optimizer)


def test_gradients_are_zeroed_and_a_store_sleeps_between_steps():
    net, optimizer = sharded()
    with advised("zero_grad() inside backward: call it between steps"):
        inside(net, optimizer.zero_grad, "backward")
    optimizer.zero_grad()
    with advised("sleep() inside forward or backward: call it between steps"):
        inside(net, lambda: zero_core.sleep(net, MemoryByteStore()), "forward")
    optimizer.zero_grad()
    step(net, optimizer)
    zero_core.sleep(net, MemoryByteStore())
    zero_core.wake(net)
    step(net, optimizer)


def test_a_gradient_can_be_changed_on_its_way():
    net, optimizer = sharded(sgd)
    with advised("parameter.register_hook sees this rank's part of it"):
        inside(net, lambda: set_full_gradient(net[0].weight, torch.zeros(4, 4)), "backward")
    optimizer.zero_grad()
    net[0].weight.register_hook(torch.zeros_like)
    step(net, optimizer)
    assert torch.equal(net[0].weight.detach(), model()[0].weight)


def test_a_second_backward_goes_without_updates_in_backward():
    net, _ = sharded(update_in_backward=True)
    backward(net)
    with advised("a gradient reached unit", "Leave update_in_backward out"):
        backward(net)
    net, optimizer = sharded()
    backward(net)
    backward(net)
    optimizer.step()


def test_a_use_inside_backward_goes_without_updates_in_backward():
    class Asks(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                self[0].weight.register_hook(lambda g: g + 0 * self[2](torch.ones(1, 4)).sum())
            return y

    def made(**options):
        torch.manual_seed(0)
        net = Asks(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        return net, zero_core.shard(net, sgd(net), units=[nn.Linear], **options)

    net, _ = made(update_in_backward=True)
    with advised("is used inside a backward that has updated it", "Leave update_in_backward out"):
        backward(net)
    step(*made())


@pytest.mark.parametrize("call", [lambda p: full_gradient(p), lambda p: p.grad.abs_()])
def test_gradients_that_are_used_up_in_backward_are_kept_or_changed_on_their_way(call):
    net, _ = sharded(sgd, update_in_backward=True)
    backward(net)
    with advised("leave that out, or change the gradient in parameter.register_hook"):
        call(net[0].weight)
    net, _ = sharded(sgd)
    backward(net)
    call(net[0].weight)
    net, optimizer = sharded(sgd, update_in_backward=True)
    net[0].weight.register_hook(torch.zeros_like)
    step(net, optimizer)
    assert torch.equal(net[0].weight.detach(), model()[0].weight)


def test_an_optimizer_that_has_not_stepped_is_given_or_its_state_is_loaded(tmp_path):
    net = model()
    optimizer = adamw(net)
    step(net, optimizer)
    optimizer.state[net[0].weight]["mine"] = torch.ones(4, 4)
    with advised("give shard() an optimizer that has not stepped, or shard first and load with zero_core.checkpoint"):
        zero_core.shard(net, optimizer)
    new = zero_core.shard(net, adamw(net))
    other, first = sharded()
    step(other, first)
    checkpoint.save(tmp_path, other, first)
    assert checkpoint.load(tmp_path, net, new).step == 1
    same(net, other)


def test_parameters_that_are_looked_up_become_a_group():
    class Slower(torch.optim.SGD):
        slow: set[int] = set()

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        factor = 0.5 if id(p) in self.slow or group.get("slow") else 1.0
                        p.data.add_(p.grad, alpha=-factor * group["lr"])

    def made(by_group):
        net = model()
        if by_group:
            optimizer = Slower([{"params": net[0].parameters(), "slow": True}, {"params": net[2].parameters()}], lr=0.1)
        else:
            optimizer = Slower(net.parameters(), lr=0.1)
            optimizer.slow = {id(p) for p in net[0].parameters()}
        return net, optimizer

    net, optimizer = made(False)
    with advised("make them a group of their own, with an option in param_groups"):
        zero_core.shard(net, optimizer)
    step(net, optimizer)
    grouped, optimizer = made(True)
    step(grouped, zero_core.shard(grouped, optimizer))
    same(grouped, net)


def test_states_begin_anew_with_zeros():
    net, optimizer = sharded()
    step(net, optimizer)
    with advised("zero_core.set_full_state(parameter, name, values) writes a state, zeros to begin anew"):
        optimizer.state.clear()
    set_full_state(net[0].weight, "exp_avg", torch.zeros(4, 4))
    assert not full_state(net[0].weight, "exp_avg").any()
    step(net, optimizer)


def test_a_state_dict_that_lacks_states_is_one_that_has_them(tmp_path):
    net, optimizer = sharded()
    plain = model()
    stock = adamw(plain)
    step(plain, stock)
    bad = copy.deepcopy(stock.state_dict())
    for state in bad["state"].values():
        del state["exp_avg"]
    with advised("Load what optimizer.full_state_dict() or a torch optimizer with the same options returned"):
        optimizer.load_state_dict(bad)
    optimizer.load_state_dict(stock.state_dict())
    optimizer.load_state_dict(optimizer.full_state_dict())
    checkpoint.save(tmp_path, net, optimizer)
    checkpoint.load(tmp_path, net, optimizer)
    assert torch.equal(full_state(net[0].weight, "exp_avg"), stock.state[plain[0].weight]["exp_avg"])


def test_weights_are_loaded_before_their_masters_or_masters_are_left_out():
    def made():
        net = model().bfloat16()
        return net, zero_core.shard(net, adamw(net))

    first, optimizer = made()
    first(X.bfloat16()).sum().backward()
    optimizer.step()
    weights, states = first.state_dict(), optimizer.full_state_dict()
    net, ours = made()
    with advised("load the weights first, with model.load_state_dict, and then the optimizer", "state_dict['masters']"):
        ours.load_state_dict(states)
    net.load_state_dict(weights)
    ours.load_state_dict(states)
    assert torch.equal(full_state(net[0].weight, "master"), full_state(first[0].weight, "master"))
    net, ours = made()
    del states["masters"]
    ours.load_state_dict(states)
    assert torch.equal(full_state(net[0].weight, "exp_avg"), full_state(first[0].weight, "exp_avg"))


def test_values_of_a_state_are_whole_and_of_a_parameter_that_is_sharded():
    net, _ = sharded()
    for call in (lambda p: full_state(p, "master"), full_gradient):
        with advised("give it one of model.parameters() after zero_core.shard(model, optimizer)"):
            call(nn.Parameter(torch.ones(2)))
        call(next(net.parameters()))
    with advised("give real numbers for the whole parameter, on every rank"):
        set_full_state(net[0].weight, "master", torch.ones(2))
    set_full_state(net[0].weight, "master", torch.ones(4, 4))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def test_a_compiled_step_goes_without_fullgraph_or_outside():
    net, optimizer = sharded()
    backward(net)
    with pytest.raises(Exception, match="leave fullgraph=True out, or call step\\(\\) outside of what is compiled"):
        torch.compile(lambda: optimizer.step(), backend="eager", fullgraph=True)()
    torch.compile(lambda: optimizer.step(), backend="eager")()
    optimizer.zero_grad()
    step(net, optimizer)
    with pytest.raises(Exception, match="leave fullgraph=True out, or compile the blocks one by one"):
        torch.compile(net, backend="eager", fullgraph=True)(X)
    torch.compiler.reset()
    assert torch.equal(torch.compile(net, backend="eager")(X), net(X))
    blocks = nn.Sequential(Block(), Block())
    optimizer = zero_core.shard(blocks, adamw(blocks), units=[Block])
    for block in blocks:
        block.compile(backend="eager", fullgraph=True)
    step(blocks, optimizer)
    torch.compiler.reset()


def test_a_norm_that_is_not_finite_and_a_scale_that_is_lowered():
    def made(**options):
        net = model().half()
        return net, zero_core.shard(net, sgd(net), **options)

    net, optimizer = made()
    (net(X.half()).sum() * 1e30).backward()
    with advised('With parameters in fp16, give zero_core.shard loss_scale="dynamic"'):
        optimizer.step()
    net, optimizer = made(loss_scale="dynamic")
    for _ in range(4):  # steps are skipped until nothing overflows
        net(X.half()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(net[0].weight.detach(), model().half()[0].weight)


def test_a_loss_that_overflows_in_fp16_is_trained_in_bf16():
    for dtype in (torch.float16, torch.bfloat16):
        net = model().to(dtype)
        scale = zero_core.LossScale(1.0, fails_at_minimum=True) if dtype is torch.float16 else None
        optimizer = zero_core.shard(net, sgd(net), loss_scale=scale)
        (net(X.to(dtype)).sum() * 1e6).backward()
        if scale is None:
            optimizer.step()
        else:
            with advised("Lower the learning rate, look for the loss that is not finite, or train in bf16"):
                optimizer.step()


def test_groups_are_added_before_shard():
    net = model()
    net[2].requires_grad_(False)
    optimizer = zero_core.shard(net, sgd(net))
    with advised("Add the group to your optimizer before shard; to unfreeze later, put the parameters in a group now"):
        optimizer.add_param_group({"params": net[2].parameters()})
    net = model()
    inner = torch.optim.SGD(net[0].parameters(), lr=0.1)
    inner.add_param_group({"params": net[2].parameters()})
    optimizer = zero_core.shard(net, inner)
    net[2].requires_grad_(False)
    step(net, optimizer)
    net[2].requires_grad_(True)
    step(net, optimizer)
    assert not torch.equal(net[2].weight.detach(), model()[2].weight)


# ---- DeviceStore -----------------------------------------------------------------------------------------------------


def test_each_shard_gets_a_device_store_of_its_own():
    store = DeviceStore()
    sharded(store=store)
    with advised("DeviceStore.attach called twice: make a new DeviceStore for each zero_core.shard"):
        sharded(store=store)
    step(*sharded(store=DeviceStore()))


class Failing(MemoryByteStore):
    fails = True

    def read(self, *args, **kwargs):
        if self.fails:
            raise OSError("the disk is away")
        return super().read(*args, **kwargs)


def test_a_store_that_cannot_sleep_or_wake_gets_what_it_lacks(tmp_path):
    net, optimizer = sharded()
    step(net, optimizer)
    checkpoint.save(tmp_path, net, optimizer)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    with advised("Nothing is lost and the store is awake: make room, or give sleep(to=) another ByteStore"):
        zero_core.sleep(net, MemoryByteStore(capacity_bytes=16))
    failing = Failing()
    zero_core.sleep(net, failing)
    with advised("call zero_core.wake(model), or wake() of the store"):
        net(X)
    with advised("call wake() again when the cause is gone", "close() it and resume from the last checkpoint"):
        zero_core.wake(net)
    failing.fails = False
    zero_core.wake(net)
    assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())
    zero_core.sleep(net, MemoryByteStore())
    zero_core.handle(net).store.wake()
    net(X)
    failing.fails = True
    zero_core.sleep(net, failing)
    with advised("close() it and resume from the last checkpoint"):
        zero_core.wake(net)
    optimizer.close()
    net, optimizer = sharded()
    checkpoint.load(tmp_path, net, optimizer)
    same(net, type("Saved", (), {"state_dict": lambda self: expected})())


def test_a_gradient_is_read_from_a_store_after_a_backward():
    net, optimizer = sharded()
    step(net, optimizer)
    store = zero_core.handle(net).store
    with advised("so there is none to read or write: run a backward first"):
        store.read_gradient(0, 0, 4)
    backward(net)
    full_gradient(net[0].weight)
    assert store.read_gradient(0, 0, 4).shape == (4,)


def test_a_state_is_written_with_the_options_that_keep_it():
    def made(momentum):
        net = model()
        groups = [{"params": net[0].parameters(), "momentum": 0.9}, {"params": net[2].parameters()}]
        return net, zero_core.shard(net, torch.optim.SGD(groups, lr=0.1, momentum=momentum), store=DeviceStore())

    net, optimizer = made(0.0)
    step(net, optimizer)
    values = torch.ones(1, 4)
    with advised("give the group the options with which the values were saved"):
        set_full_state(net[2].weight, "momentum_buffer", values)
    net, optimizer = made(0.9)
    step(net, optimizer)
    set_full_state(net[2].weight, "momentum_buffer", values)
    assert torch.equal(full_state(net[2].weight, "momentum_buffer"), values)


def test_a_model_whose_store_failed_is_built_again(tmp_path):
    class Forgets(DeviceStore):
        def attach(self, shards, optimizer, initial, *, context):
            super().attach(shards, optimizer, initial, context=context)
            self.close()
            raise RuntimeError("no room")

    net = model()
    with advised("Build the model again before the next shard(); one that is built in deferred_init() loses nothing"):
        zero_core.shard(net, adamw(net), store=Forgets())
    step(*sharded())
    with zero_core.deferred_init(seed=0):
        net = model()
    with pytest.raises(RuntimeError, match="no room"):
        zero_core.shard(net, adamw(net), store=Forgets())
    step(net, zero_core.shard(net, adamw(net)))


def test_a_model_that_was_updated_by_half_is_loaded_from_a_checkpoint(tmp_path):
    class Stops(DeviceStore):
        stops = False

        def update(self, *args):
            if self.stops:
                raise KeyboardInterrupt
            super().update(*args)

    store = Stops()
    net, optimizer = sharded(store=store)
    step(net, optimizer)
    checkpoint.save(tmp_path, net, optimizer)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    store.stops = True
    with pytest.raises(KeyboardInterrupt):
        step(net, optimizer)
    with advised("Build the model and its optimizer anew, and load the last checkpoint"):
        net(X)
    net, optimizer = sharded()
    checkpoint.load(tmp_path, net, optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())
    step(net, optimizer)


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
    net(rows).sum().backward()
    optimizer.step()


def test_a_store_without_access_lets_a_hook_see_gradients():
    class Plain:
        def __init__(self):
            self.store = DeviceStore()

        def __getattr__(self, name):
            if name in ("read_gradient", "write_gradient"):
                raise AttributeError(name)
            return getattr(self.store, name)

    net, optimizer = sharded(store=Plain())
    backward(net)
    with advised("parameter.register_hook sees this rank's part of a gradient in backward"):
        full_gradient(net[0].weight)
    optimizer.zero_grad()
    seen = []
    net[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    backward(net)
    plain = model()
    backward(plain)
    assert torch.equal(seen[0], plain[0].weight.grad)


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


@pytest.mark.parametrize("scale", [None, "dynamic"])
def test_loss_scale_takes_the_place_of_a_grad_scaler(scale):
    net, optimizer = sharded(sgd, loss_scale=scale)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(X).sum()).backward()
    advice = 'pass loss_scale="dynamic" to zero_core.shard, and leave' if scale is None else "leave the GradScaler out"
    with advised(advice):
        scaler.step(optimizer)
    step(*sharded(sgd, loss_scale="dynamic"))


# ---- parameters ------------------------------------------------------------------------------------------------------


def test_a_model_is_copied_and_pickled_before_shard_or_by_its_state_dict(tmp_path):
    net = model()
    earlier = copy.deepcopy(net)
    optimizer = zero_core.shard(net, adamw(net))
    for refused in (copy.deepcopy, pickle.dumps):
        with advised("Copy it before zero_core.shard; to keep values, use zero_core.checkpoint.save, or torch.save"):
            refused(net)
    with advised("copy the model before zero_core.shard, or its state_dict"):
        copy.deepcopy(net[0].weight)
    with advised("use zero_core.checkpoint.save, or model.state_dict()"):
        pickle.dumps(net[0].weight)
    step(net, optimizer)
    torch.save(net.state_dict(), tmp_path / "state")
    new = model()
    new.load_state_dict(torch.load(tmp_path / "state"))
    same(new, net)
    new.load_state_dict(copy.deepcopy(net.state_dict()))
    new.load_state_dict(pickle.loads(pickle.dumps(net.state_dict())))
    same(new, net)
    checkpoint.save(tmp_path / "folder", net, optimizer)
    other, ours = sharded()
    checkpoint.load(tmp_path / "folder", other, ours)
    same(other, net)
    step(earlier, adamw(earlier))
    same(earlier, net)


def test_memory_is_shown_by_gathered():
    net, _ = sharded()
    with advised("use zero_core.gathered(module)"):
        net[0].weight.data_ptr()
    with zero_core.gathered(net):
        assert net[0].weight.data_ptr()
    net = parts.build("wrapper")
    zero_core.shard(net, sgd(net))
    weight = net[1][0].base.weight
    with pytest.raises(AttributeError, match="the inner tensors of .* have no memory: use zero_core.gathered"):
        weight.__tensor_flatten__()
    with zero_core.gathered(net):
        assert weight.__tensor_flatten__()[0] == ["codes", "scale"]


def test_values_of_a_quantised_parameter_are_written_by_copy():
    net = parts.build("wrapper")
    zero_core.shard(net, sgd(net))
    weight, values = net[1][0].base.weight, parts.Scaled.of(torch.ones(parts.WIDTH, parts.WIDTH))
    with advised("quantise the model before zero_core.shard; write values with copy_()"):
        weight.data = values
    with advised("Read with p.detach(), write with p.copy_() or inside zero_core.gathered(module)"):
        _ = weight.data
    with torch.no_grad():
        weight.copy_(values)
    assert torch.equal(weight.detach().codes, values.codes)
    with zero_core.gathered(net), torch.no_grad():
        weight.copy_(parts.Scaled.of(-torch.ones(parts.WIDTH, parts.WIDTH)))
    assert torch.equal(weight.detach().codes, -values.codes)


def test_values_of_a_quantised_parameter_are_changed_before_shard():
    net = parts.build("wrapper")
    zero_core.shard(net, sgd(net))
    weight = net[1][0].base.weight
    with zero_core.gathered(net):
        pass
    weight.codes = torch.ones(parts.WIDTH, parts.WIDTH, dtype=torch.int8)
    with advised("move, cast and quantise the model before zero_core.shard"):
        net(torch.ones(1, parts.WIDTH))
    net = parts.build("wrapper")
    net[1][0].base.weight.codes.fill_(1)
    zero_core.shard(net, sgd(net))
    net(torch.ones(1, parts.WIDTH))


def test_a_view_from_before_a_step_is_taken_anew_or_cloned():
    net, optimizer = sharded()
    view, kept = net[0].weight.data, net[0].weight.data.clone()
    step(net, optimizer)
    with advised("Take a new view, or clone() what is to stay"):
        view.sum()
    assert not torch.equal(net[0].weight.data, kept)


def test_a_model_is_moved_and_cast_before_shard_or_by_its_options():
    for change in (lambda net: net.to(torch.bfloat16), lambda net: net.to("meta")(X)):
        net, _ = sharded()
        with advised("before"):
            change(net)
    net, _ = sharded()
    with advised("move or cast the model before zero_core.shard, whose device= and param_dtype= say where and in what"):
        net.to(torch.bfloat16)
    with advised("do it before, write values inside zero_core.gathered, or give torch.func.functional_call values"):
        net[0].weight = nn.Parameter(torch.ones(4, 4))
        net(X)
    cast = model().to(torch.bfloat16)
    zero_core.shard(cast, adamw(cast))
    ours, _ = sharded(param_dtype=torch.bfloat16, device="cpu")
    assert torch.equal(ours(X.bfloat16()), cast(X.bfloat16()))
    with zero_core.gathered(ours), torch.no_grad():
        ours[0].weight.copy_(torch.ones(4, 4))
    values = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    assert torch.equal(torch.func.functional_call(ours, values, (X.bfloat16(),)), ours(X.bfloat16()))


def test_a_parameter_that_a_forward_changed_is_of_a_model_built_anew():
    def cast(module, args, output):
        module.weight.data = module.weight.data.bfloat16()

    net = model()
    net[0].register_forward_hook(cast)  # before ours, which takes the memory away
    zero_core.shard(net, adamw(net))
    with torch.no_grad():
        net(X)
    with advised("shard again a model built anew"):
        net(X)
    step(*sharded())


def test_memory_is_not_shared_by_assigning_data():
    net, _ = sharded()
    with advised("which in torch makes the two share memory: write p.data.copy_(q.data)"):
        net[2].weight.data = net[0].weight.data[:1]
    net[2].weight.data.copy_(net[0].weight.data[:1])
    assert torch.equal(net[2].weight.detach(), net[0].weight.detach()[:1])


def test_a_tensor_that_was_assigned_is_copied_or_let_go():
    net, optimizer = sharded()
    held = torch.ones(4, 4)
    net[0].weight.data = held
    backward(net)
    with advised("Write p.data.copy_(tensor) instead, or let go of the tensor (del) before") as raised:
        optimizer.step()
    del held
    optimizer.step()
    assert raised.tb is not None  # a notebook keeps the last traceback, too
    net, optimizer = sharded()
    held = torch.ones(4, 4)
    net[0].weight.data.copy_(held)
    step(net, optimizer)


def test_a_parameter_is_made_before_shard_or_of_a_copy():
    net, _ = sharded()
    with advised("Do it before zero_core.shard", "write nn.Parameter(p.detach().clone())"):
        nn.utils.parametrizations.weight_norm(net[0])
    copied = nn.Parameter(net[0].weight.detach().clone())
    assert torch.equal(copied, net[0].weight.detach())
    net = model()
    nn.utils.parametrizations.weight_norm(net[0])
    step(net, zero_core.shard(net, adamw(net)))


def test_a_state_dict_from_inside_gathered_is_loaded():
    net, _ = sharded()
    with zero_core.gathered(net):
        state = net.state_dict()
    with advised("write into the parameter itself, or load_state_dict(state)"), torch.no_grad():
        state["0.weight"].fill_(1.0)
    with torch.no_grad():
        net[0].weight.fill_(2.0)
    assert torch.equal(net[0].weight.detach(), torch.full((4, 4), 2.0))
    net.load_state_dict(state)
    assert torch.equal(net[0].weight.detach(), torch.ones(4, 4))


# ---- the model -------------------------------------------------------------------------------------------------------


def test_a_model_is_traced_before_shard_or_as_a_plain_one():
    net = model()
    torch.jit.trace(net, (X,), check_trace=False)
    zero_core.shard(net, adamw(net))
    with advised("Do it before zero_core.shard, or with a plain model that loads its state_dict()"):
        torch.jit.trace(net, (X,))
    plain = model()
    plain.load_state_dict(net.state_dict())
    assert torch.equal(torch.jit.trace(plain, (X,), check_trace=False)(X), net(X))


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


def test_what_is_trained_later_requires_a_gradient_at_shard():
    net = model()
    net[2].requires_grad_(False)
    zero_core.shard(net, torch.optim.SGD(net.parameters(), lr=0.1))
    net[2].requires_grad_(True)
    with advised("Call zero_core.shard while all that will be trained requires a gradient, and freeze", "no_grad()"):
        net(X)
    with torch.no_grad():
        net(X)
    net, optimizer = sharded()
    for trained in (False, True):
        net[2].requires_grad_(trained)
        before = net[2].weight.detach().clone()
        step(net, optimizer)
        assert torch.equal(net[2].weight.detach(), before) != trained


def test_a_forked_process_runs_a_plain_model():
    net, _ = sharded()
    expected = net(X).sum().item()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with torch.no_grad():
                with advised(
                    "In a worker of a DataLoader, use a plain model that loads its state_dict(), or run it in"
                ):
                    net(X)
                plain = model()
                plain.load_state_dict(state)
                os.write(writing, repr(plain(X).sum().item()).encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    told = os.read(reading, 4096).decode()
    os.waitpid(child, 0)
    assert told == repr(expected)


def test_threads_take_turns_with_a_lock():
    net, optimizer = sharded()
    raised = []

    def other():
        try:
            net(X)
        except Exception as error:
            raised.append(str(error))

    def in_thread(call):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)

    inside(net, partial(in_thread, other), "forward")
    assert "Let them take turns, with one threading.Lock around forward, backward and step" in raised[0]
    optimizer.zero_grad()
    lock, steps = threading.Lock(), optimizer.step_count

    def turns():
        for _ in range(3):
            with lock:
                step(net, optimizer)

    threads = [threading.Thread(target=turns) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert optimizer.step_count == steps + 6

"""What errors of an optimizer and its store advise: each test makes the mistake, follows the advice, and that works."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.following import X, adamw, advised, backward, inside, model, same, sgd, sharded, step
from zero_core import checkpoint, full_gradient, full_state, set_full_gradient, set_full_state
from zero_core.optim.device_store import DeviceStore
from zero_offload import MemoryByteStore

# ---- the optimizer ---------------------------------------------------------------------------------------------------


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
        kit.step(optimizer, net(X.half()).sum())
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

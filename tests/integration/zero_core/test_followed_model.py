"""What errors of a sharded model and its parameters advise: each test does what one says, and that works."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from functools import partial

import pytest
import torch
from torch import nn

import zero_core
from tests.following import X, adamw, advised, backward, inside, model, same, sgd, sharded, step
from tests.integration.zero_core import test_parts as parts
from zero_core import checkpoint

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
        net[0].weight.untyped_storage()
    with advised("use zero_core.gathered(module)"):
        int(net[0].weight.data_ptr())
    with zero_core.gathered(net):
        assert net[0].weight.data_ptr() and net[0].weight.untyped_storage()
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


def test_new_values_are_copied_into_a_view():
    net, _ = sharded()
    view = net[0].weight.data
    with advised("write into the view with copy_(tensor)"):
        view.data = torch.ones_like(view)
    view.copy_(torch.ones(view.shape))
    assert bool((net[0].weight.detach() == 1).all())


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


def test_values_are_assigned_to_the_attribute_that_holds_a_tensor():
    net, values = model(), torch.ones(4, 4)
    net.view = net[0].weight.detach()
    zero_core.shard(net, adamw(net))
    with advised("assign the values to the attribute that holds the tensor"):
        net.view.data = values
    net.view = values
    assert net.view is values and not torch.equal(net[0].weight.detach(), values)


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


def test_a_gradient_is_cloned_to_be_a_leaf():
    net, _ = sharded()
    weight = net[0].weight
    net(X).sum().backward()
    with advised("Clone it first, p.grad.clone()"):
        weight.grad.requires_grad_()
    leaf = weight.grad.clone().requires_grad_()
    leaf.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(4, 4))


def test_storages_and_dlpack_are_written_by_the_view_or_by_a_clone():
    net, _ = sharded()
    weight = net[0].weight
    with advised("which would be lost: write into the view itself, with copy_(tensor)"):
        weight.data.untyped_storage().fill_(0)
    weight.data.copy_(torch.ones(4, 4))
    assert torch.equal(weight.detach(), torch.ones(4, 4))
    with advised("Give it a clone, from_dlpack(p.detach().clone()), and write back with p.copy_()"):
        torch.from_dlpack(weight.data)
    given = torch.from_dlpack(weight.detach().clone()).mul_(3)
    with torch.no_grad():
        weight.copy_(given)
    assert torch.equal(weight.detach(), torch.full((4, 4), 3.0))
    backward(net)
    with advised("Give it a clone, from_dlpack(p.grad.clone()), and write back with p.grad.copy_()"):
        torch.from_dlpack(weight.grad)
    given = torch.from_dlpack(weight.grad.clone()).fill_(2.0)
    weight.grad.copy_(given)
    assert torch.equal(zero_core.full_gradient(weight), torch.full((4, 4), 2.0))


def test_a_state_dict_from_inside_gathered_is_loaded():
    net, _ = sharded()
    expected = net[0].weight.detach().clone()
    with zero_core.gathered(net):
        state = net.state_dict()
    with advised("write into the parameter itself, or load_state_dict(state)"), torch.no_grad():
        state["0.weight"].fill_(1.0)
    with torch.no_grad():
        net[0].weight.fill_(2.0)
    assert torch.equal(net[0].weight.detach(), torch.full((4, 4), 2.0))
    net.load_state_dict(state)
    assert torch.equal(net[0].weight.detach(), expected)


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

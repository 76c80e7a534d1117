"""Hooks of the user's on parameters: the same calls and the same gradients, put on before `shard` or after it."""

from functools import partial

import pytest
import torch
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import GradientError

pytestmark = pytest.mark.promise("parameter-hooks")

WHEN = pytest.mark.parametrize("when", ["before", "after"])
EVERYWHERE = pytest.mark.parametrize(("size", "stages"), [(1, (0, 3)), (2, (0, 1, 2, 3))])


def accumulator(parameter):
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def after_accumulation(model, log):
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: log.append((name, p.grad.clone())))


def on_gradients(model, log):
    for name, p in model.named_parameters():
        p.register_hook(lambda gradient, name=name: log.append((name, gradient.clone())) or gradient * 2)


def on_all_gradients(model, log):
    register_multi_grad_hook(list(model.parameters()), lambda gradients: log.append(("all", *gradients)))


def on_any_gradient(model, log):
    register_multi_grad_hook(list(model.parameters()), lambda gradient: log.append(("any", gradient)), mode="any")


def on_nodes(model, log):
    for name, p in model.named_parameters():
        node = accumulator(p)
        node.register_prehook(lambda gradients, name=name: log.append((name, *gradients)))
        node.register_hook(lambda _, gradients, name=name: log.append((name, *gradients)))
        log.append((name, node))  # torch keeps the node only as long as somebody has it


def step_in_backward(model, log):
    """torch's recipe for an optimizer step in backward."""
    optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}

    def step(p):
        log.append(("gradient", p.grad.clone()))
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


KINDS = {
    hook.__name__: hook
    for hook in (after_accumulation, on_gradients, on_all_gradients, on_any_gradient, on_nodes, step_in_backward)
}


def trained(hook, when, stage):
    """What the hooks were called with, and the parameters after two steps. when=None: plain torch."""
    torch.manual_seed(0)
    model, log = toys.Stack(), []
    optimizer = toys.sgd(model.parameters())
    if when != "after":
        hook(model, log)
    if when is not None:
        optimizer = zero_core.shard(model, optimizer, stage=stage)
    if when == "after":
        hook(model, log)
    for step in range(2):
        kit.step(optimizer, toys.loss_of(model, toys.data(step, 0)))
    parameters = [p.detach().clone() for p in model.parameters()]
    if when is not None:
        optimizer.close()
    return [entry for entry in log if not hasattr(entry[1], "next_functions")], parameters


@EVERYWHERE
@WHEN
@pytest.mark.parametrize("kind", KINDS)
@kit.on_ranks()
def test_are_called_as_in_plain_torch(size, stages, kind, when):
    for stage in stages:
        calls, parameters = trained(KINDS[kind], when, stage)
        plain_calls, plain_parameters = trained(KINDS[kind], None, stage)
        assert [name for name, *_ in calls] == [name for name, *_ in plain_calls]
        assert len(calls) >= 2
        torch.testing.assert_close([call[1:] for call in calls], [call[1:] for call in plain_calls])
        torch.testing.assert_close(parameters, plain_parameters)


def test_the_edge_of_a_sharded_parameter_is_that_of_its_gradient():
    model = kit.sharded(toys.Stack, toys.sgd)[0]
    loss = toys.loss_of(model, toys.data(0, 0))
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, [get_gradient_edge(p) for p in parameters], retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(loss, parameters))


def reads(p):
    p.grad.clone()


@pytest.mark.parametrize("where", ["gathered", "forward"])
def test_a_hook_that_would_find_no_gradient_is_refused(where):
    model, optimizer = kit.sharded(toys.Stack, toys.sgd)
    handles, add = [], partial(model.head.weight.register_post_accumulate_grad_hook, reads)
    if where == "gathered":
        with zero_core.gathered(model):
            handles.append(add())
    else:
        model.head.register_forward_pre_hook(lambda *_: handles.append(add()) if not handles else None)
        model(toys.data(0, 0))
    with pytest.raises(GradientError, match="'reads' was registered on head.weight .* Register it outside"):
        toys.loss_of(model, toys.data(0, 0)).backward()
    handles[0].remove()
    toys.loss_of(model, toys.data(0, 0)).backward()
    optimizer.zero_grad()
    model.head.weight.register_post_accumulate_grad_hook(reads)
    toys.loss_of(model, toys.data(0, 0)).backward()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_hook_that_would_find_one_gradient_of_a_sum_is_refused(stage):
    """The advice is followed: without the hook, the sum is read and changed before the step, as torch's hook would."""
    plain, stock, model, optimizer = kit.pair(toys.Stack, toys.sgd, stage=stage)
    weight = model.head.weight
    handle = weight.register_post_accumulate_grad_hook(reads)
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(GradientError, match="'reads' on head.weight .* Remove the hook, and read the sum with"):
        toys.loss_of(model, toys.data(1, 0)).backward()
    optimizer.zero_grad()
    handle.remove()
    for step in range(2):
        toys.loss_of(model, toys.data(step, 0)).backward()
        toys.loss_of(plain, toys.data(step, 0)).backward()
    torch.testing.assert_close(zero_core.full_gradient(weight), plain.head.weight.grad)
    zero_core.set_full_gradient(weight, zero_core.full_gradient(weight) / 2)
    plain.head.weight.grad.mul_(0.5)
    optimizer.step()
    stock.step()
    optimizer.zero_grad()
    kit.assert_same(model, plain)
    weight.register_post_accumulate_grad_hook(reads)
    for step in range(2):  # one backward in each step
        kit.step(optimizer, toys.loss_of(model, toys.data(step, 0)))

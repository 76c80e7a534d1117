"""Leaves made of the values of a sharded parameter or of its gradient, and what autograd computes of them.

Plain torch's results are the expected ones. Each test fails if a gradient or a hook reaches another tensor than the
leaf: `.grad` is None then, hooks are not called, and torch.autograd.functional returns zeros.
"""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import functional
from torch.distributions import Independent, Normal
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import ChangedParameterError, GradientError

pytestmark = pytest.mark.promise("leaves")

STAGES = pytest.mark.parametrize("stage", [0, 3])
WHERE = pytest.mark.parametrize(("size", "stage"), [(1, 0), (1, 3), (2, 3)])


def required(tensor):
    tensor.requires_grad = True
    return tensor


def without_graph(weight):
    with torch.no_grad():
        return weight.view(-1).requires_grad_()


LEAVES = {
    "detach": lambda model: model.head.weight.detach().requires_grad_(),
    "data": lambda model: model.head.weight.data.requires_grad_(requires_grad=True),
    "set": lambda model: required(model.head.weight.detach()),
    "state dict": lambda model: model.state_dict()["head.weight"].requires_grad_(),
    "on the CPU": lambda model: model.head.weight.detach().cpu().requires_grad_(),
    "contiguous": lambda model: model.head.weight.detach().contiguous().requires_grad_(),
    "row": lambda model: model.head.weight.data[0].requires_grad_(),
    "without a graph": lambda model: without_graph(model.head.weight),
    "asarray": lambda model: torch.asarray(model.head.weight.data, requires_grad=True),
    "copied": lambda model: copy.deepcopy(model.head.weight.detach().requires_grad_()),
}


def asked(leaf):
    """What a leaf answers before and after two backwards, and what its hook was given."""
    seen = []
    leaf.register_hook(lambda gradient: seen.append(gradient.sum()))
    before = leaf.requires_grad, leaf.is_leaf, leaf.grad, leaf.shape.numel()
    for power in (2, 3):
        leaf.view(-1).pow(power).sum().backward()
    summed, leaf.grad = leaf.grad, None
    (by_grad,) = torch.autograd.grad(leaf.sin().sum(), leaf)
    torch.autograd.backward(leaf.cos().sum(), inputs=[leaf])
    return before, summed, by_grad, leaf.grad, seen


@WHERE
@kit.on_ranks()
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_view_becomes_a_leaf(stage, leaf):
    dense, _, model, optimizer = kit.pair(toys.Stack, toys.sgd, stage=stage)
    ours, theirs = asked(LEAVES[leaf](model)), asked(LEAVES[leaf](dense))
    assert ours[0] == theirs[0]
    torch.testing.assert_close(ours[1:], theirs[1:])
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))  # the model is as it was


def loss_of_values(model):
    names, x = [name for name, _ in model.named_parameters()], toys.data(0, 0)
    return lambda *values: functional_call(model, dict(zip(names, values, strict=True)), (x,)).square().mean()


def ones(values):
    return tuple(torch.ones(value.shape) for value in values)


FUNCTIONS = {
    "jacobian": functional.jacobian,
    "jacobian, strict": lambda f, values: functional.jacobian(f, values, strict=True, create_graph=True),
    "jvp": lambda f, values: functional.jvp(f, values, ones(values))[1],
    "hvp": lambda f, values: functional.hvp(f, values, ones(values))[1],
}
VALUES = (lambda p: p, lambda p: p.detach(), lambda p: p.data, lambda p: p.detach().clone())


@pytest.mark.promise("torch-func")
@WHERE
@kit.on_ranks()
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_autograd_equal_plain_torch(stage, function):
    dense, _, model, _ = kit.pair(toys.Stack, stage=stage)
    for of in VALUES:
        results = [FUNCTIONS[function](loss_of_values(m), tuple(map(of, m.parameters()))) for m in (model, dense)]
        torch.testing.assert_close(*results)


def trained(leaves):
    """Leaves that an optimizer of their own trains, as in a meta-learner's inner loop."""
    seen, inner = [], toys.sgd(leaves)
    leaves[0].register_hook(lambda gradient: seen.append(gradient.sum()))
    for step in range(2):
        x = toys.data(step, 0)[:, :1].expand(-1, toys.WIDTH)
        kit.step(inner, nn.functional.linear(x, *leaves).square().sum())
    return [*(leaf.detach().clone() for leaf in leaves), *seen]


@WHERE
@kit.on_ranks()
def test_an_optimizer_trains_leaves_and_with_them_the_parameters_whose_views_they_are(stage):
    dense, theirs, model, optimizer = kit.pair(toys.Stack, toys.sgd, stage=stage)
    for of in (lambda p: p.detach().clone(), lambda p: p.detach(), lambda p: p.data):
        ours = [trained([of(p).requires_grad_() for p in each.head.parameters()]) for each in (model, dense)]
        torch.testing.assert_close(*ours)
        for each, step in ((model, optimizer), (dense, theirs)):
            kit.step(step, toys.loss_of(each, toys.data(0, 0)))
        kit.assert_same(model, dense)


@WHERE
@kit.on_ranks()
def test_a_backward_from_parameters_gives_them_gradients(stage):
    """As a sum of several tasks' gradients, which autograd.grad returned. p.grad may have one already."""
    dense, theirs, model, optimizer = kit.pair(toys.Stack, toys.sgd, stage=stage)
    for each, step in ((model, optimizer), (dense, theirs)):
        given, losses = [*each.parameters()], [toys.loss_of(each, toys.data(k, 0)) for k in range(3)]
        first, second = (torch.autograd.grad(loss, given) for loss in losses[:2])
        torch.autograd.backward(given, [a - 2 * b for a, b in zip(first, second, strict=True)])
        losses[2].backward()
        torch.autograd.backward(each.head.weight, torch.ones(3, toys.WIDTH))
        step.step()
    kit.assert_same(model, dense)


@STAGES
@pytest.mark.parametrize("write", ["step", "write"])
def test_a_backward_over_a_leaf_whose_parameter_was_written_meanwhile_raises(stage, write):
    """As torch's does. It would run over the old values."""

    def run(model, optimizer):
        leaf = model.head.weight.detach().requires_grad_()
        loss = leaf.square().sum()
        toys.loss_of(model, toys.data(0, 0)).backward()
        optimizer.step()
        if write == "write":
            with torch.no_grad():
                model.head.weight.add_(1.0)
        loss.backward()

    dense, _, model, optimizer = kit.pair(toys.Stack, toys.sgd, stage=stage)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(dense, toys.sgd(dense.parameters()))
    with pytest.raises(ChangedParameterError, match=r"is used after a step\(\) or a write"):
        run(model, optimizer)


@STAGES
def test_a_view_that_requires_no_gradient_and_one_that_a_graph_is_written_into_stay(stage):
    def run(model):
        scale = torch.full((1,), 2.0, requires_grad=True)
        weight = model.head.weight.detach().requires_grad_(False)
        weight.mul_(scale)
        weight.sum().backward()
        return scale.grad, model.head.weight.detach().clone()

    dense, _, model, _ = kit.pair(toys.Stack, stage=stage)
    torch.testing.assert_close(run(model), run(dense))


@WHERE
@kit.on_ranks()
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_either_kind_trains_a_parameter_that_it_is_given(stage, reentrant):
    """A reentrant one computes again with a leaf of its own over the parameter's values."""

    def loss(model, x):
        given = torch.ones(2, toys.WIDTH, requires_grad=True)
        part = checkpoint(lambda x, w: (x @ w.T).square().mean(), given, model.head.weight, use_reentrant=reentrant)
        return part + toys.loss_of(model, x)

    toys.beside(toys.Stack, steps=2, loss=loss, stage=stage)


GRADIENTS = {
    "row": lambda gradient: gradient[0],
    "on the CPU": lambda gradient: gradient.cpu(),
    "a clone": lambda gradient: gradient.clone(),
}


@STAGES
@pytest.mark.parametrize("of", GRADIENTS)
def test_a_view_of_a_gradient_becomes_a_leaf(stage, of):
    dense, _, model, optimizer = kit.pair(toys.Stack, toys.sgd, stage=stage)
    results = []
    for each in (model, dense):
        toys.loss_of(each, toys.data(0, 0)).backward()
        results.append(asked(GRADIENTS[of](each.head.weight.grad).requires_grad_())[1:])
    torch.testing.assert_close(*results)
    optimizer.zero_grad(set_to_none=False)  # which calls requires_grad_(False) on it


@pytest.mark.advice("Clone it first, p.grad.clone()")
@STAGES
@pytest.mark.parametrize("of", [lambda gradient: gradient, lambda gradient: gradient.detach()])
def test_a_gradient_itself_does_not_become_a_leaf(stage, of):
    model, _ = kit.sharded(toys.Stack, stage=stage)
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(GradientError, match=r"head\.weight\.grad\.requires_grad_\(\).* Clone it first"):
        of(model.head.weight.grad).requires_grad_()
    leaf = model.head.weight.grad.clone().requires_grad_()
    leaf.square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * zero_core.full_gradient(model.head.weight))


class Returning(nn.Module):
    """Returns views of its own parameters, as a policy its log_std."""

    def __init__(self):
        super().__init__()
        self.net, self.log_std = nn.Linear(5, 4), nn.Parameter(torch.full((4,), -2.0))

    def forward(self, x):
        mean = self.net(x)
        around = Independent(Normal(self.log_std, 1 + mean.square()), 1)
        return around, {"std": self.log_std.expand_as(mean), "wide": [self.log_std[None].detach(), self.net.weight.t()]}


@pytest.mark.promise("returned-views")
@WHERE
@kit.on_ranks()
def test_views_of_parameters_that_a_forward_returns_have_values_and_gradients(stage):
    """Fails if a view reads the memory that its unit has given back."""

    def losses(model, optimizer):
        for _ in range(3):
            with torch.no_grad():
                std = model(toys.data(0, 0))[1]["std"].clone()
            yield std
            around, given = model(toys.data(0, 0))
            loss = (
                around.log_prob(torch.ones(6, 4)).mean()
                + given["std"].exp().mean()
                + given["wide"][0].sum()
                + given["wide"][1].mean()
            )
            yield kit.step(optimizer, loss)

    dense, dense_optimizer, model, optimizer = kit.pair(Returning, toys.sgd, stage=stage)
    torch.testing.assert_close([*losses(model, optimizer)], [*losses(dense, dense_optimizer)])

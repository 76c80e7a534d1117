"""Leaves made of the values of a sharded parameter or of its gradient: views are refused, and clones are right.

Plain torch fills the leaf's `.grad`. Without the refusal it stays None here, hooks are not called, and
torch.autograd.functional returns zeros. The clones fail if one of them is refused or has another gradient.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import functional
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import GradientError, ShardedParameterError

STAGES = pytest.mark.parametrize("stage", [0, 3])
REFUSED = r"of a Sharded parameter .* is to require a gradient, .* clone\(\), as in p\.detach\(\)\.clone\(\)"


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
    "row": lambda model: model.head.weight.data[0].requires_grad_(),
    "without a graph": lambda model: without_graph(model.head.weight),
    "used": lambda model: torch.asarray(model.head.weight.data, requires_grad=True).square().sum(),
}


@STAGES
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_view_does_not_become_a_leaf(stage, leaf):
    model, optimizer = kit.sharded(toys.Stack, stage=stage)
    with pytest.raises(ShardedParameterError, match=REFUSED):
        LEAVES[leaf](model)
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))  # the model is as it was


def loss_of_values(model, x):
    names = [name for name, _ in model.named_parameters()]
    return lambda *values: functional_call(model, dict(zip(names, values, strict=True)), (x,)).square().mean()


def ones(values):
    return tuple(torch.ones(value.shape) for value in values)


def hessian(f, values):
    return functional.hessian(lambda bias: f(*values[:-1], bias), values[-1])


FUNCTIONS = {
    "jacobian": functional.jacobian,
    "hessian": hessian,
    "vjp": lambda f, values: functional.vjp(f, values)[1],
    "jvp": lambda f, values: functional.jvp(f, values, ones(values))[1],
    "vhp": lambda f, values: functional.vhp(f, values, ones(values))[1],
    "hvp": lambda f, values: functional.hvp(f, values, ones(values))[1],
}
VALUES = {"p": lambda p: p, "p.detach()": lambda p: p.detach(), "p.data": lambda p: p.data}


@STAGES
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_of_autograd_refuse_views_and_take_clones(stage, function):
    dense, model = kit.twins(toys.Stack)
    kit.sharded(model, stage=stage)
    x, results = toys.data(0, 0), []
    for each in (dense, model):
        values = tuple(p.detach().clone() for p in each.parameters())
        results.append(FUNCTIONS[function](loss_of_values(each, x), values))
    torch.testing.assert_close(*results)
    for of in VALUES.values():
        with pytest.raises(ShardedParameterError, match=REFUSED):
            FUNCTIONS[function](loss_of_values(model, x), tuple(of(p) for p in model.parameters()))


def trained_copies(model):
    """Copies of the head's parameters that an optimizer of their own trains, as in a meta-learner's inner loop."""
    copies = [p.detach().clone().requires_grad_() for p in model.head.parameters()]
    seen, inner = [], toys.sgd(copies)
    copies[0].register_hook(lambda gradient: seen.append(gradient.sum()))
    for step in range(2):
        x = toys.data(step, 0)[:, :1].expand(-1, toys.WIDTH)
        kit.step(inner, nn.functional.linear(x, *copies).square().sum())
    return [*copies, *seen]


@STAGES
def test_a_clone_is_a_leaf(stage):
    dense, model = kit.twins(toys.Stack)
    kit.sharded(model, stage=stage)
    torch.testing.assert_close(trained_copies(model), trained_copies(dense))


@STAGES
def test_a_view_that_requires_no_gradient_and_one_that_a_graph_is_written_into_stay(stage):
    def run(model):
        scale = torch.full((1,), 2.0, requires_grad=True)
        weight = model.head.weight.detach().requires_grad_(False)
        weight.mul_(scale)
        weight.sum().backward()
        return scale.grad, model.head.weight.detach().clone()

    dense, model = kit.twins(toys.Stack)
    kit.sharded(model, stage=stage)
    torch.testing.assert_close(run(model), run(dense))


class Inside(toys.Stack):
    """Makes leaves of a block's weight inside of the block's forward, where it is a plain parameter."""

    def make_block(self):
        class Penalised(toys.Block):
            def forward(self, x):
                with torch.enable_grad():
                    leaf = self.up.weight.detach().requires_grad_()
                    leaf.square().sum().backward()
                product = functional.vjp(lambda w: w.square().sum(), self.up.weight)[1]
                return super().forward(x) + 0.01 * (leaf.grad.sum() + product.sum())

        return Penalised()


@STAGES
def test_leaves_made_inside_of_the_units_own_forward_are_right(stage):
    toys.train(Inside, stage=stage, steps=2)


@STAGES
def test_a_reentrant_checkpoint_refuses_the_parameter_itself(stage):
    """Its own leaf of the parameter would keep the gradient. The other kind of checkpoint trains the parameter."""
    dense, model = kit.twins(toys.Stack)
    optimizer = kit.sharded(model, stage=stage)[1]

    def of_parameter(model, reentrant):
        x = torch.ones(2, toys.WIDTH, requires_grad=True)
        return checkpoint(lambda x, w: (x @ w.T).square().sum(), x, model.head.weight, use_reentrant=reentrant)

    with pytest.raises(ShardedParameterError, match=r"torch\.utils\.checkpoint, pass use_reentrant=False"):
        of_parameter(model, True).backward()
    optimizer.zero_grad()
    for each, step in ((model, optimizer), (dense, toys.sgd(dense.parameters()))):
        kit.step(step, of_parameter(each, False))
    torch.testing.assert_close(kit.values(model), [p.detach() for p in dense.parameters()])


GRADIENTS = {
    "itself": lambda gradient: gradient,
    "detached": lambda gradient: gradient.detach(),
    "row": lambda gradient: gradient[0],
    "on the CPU": lambda gradient: gradient.cpu(),
}


@STAGES
@pytest.mark.parametrize("of", GRADIENTS)
def test_a_gradient_does_not_become_a_leaf(stage, of):
    model, optimizer = kit.sharded(toys.Stack, stage=stage)
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(GradientError, match=r"head\.weight\.grad, or a view of it, is to require a gradient"):
        GRADIENTS[of](model.head.weight.grad).requires_grad_()
    leaf = model.head.weight.grad.clone().requires_grad_()
    leaf.square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * zero_core.full_gradient(model.head.weight))
    optimizer.zero_grad(set_to_none=False)  # which calls requires_grad_(False) on it

"""torch.func, second derivatives, and parameters, modules and hooks of one call alone equal plain torch.

Blocks are recomputed. Each case fails if the second run of a block finds other ones than the first.
"""

import pytest
import torch
from torch.func import functional_call

from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_core.test_transforms import TRAINED, VALUES, values
from zero_offload import offload_activations


def penalty(model, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0]


def after_a_step(model, x):
    """The outputs of the model after a step of its own, through which the loss is differentiated."""
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(model(x).square().mean(), [*parameters.values()], create_graph=True)
    stepped = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
    return functional_call(model, stepped, (x,))


def with_a_hook(model, x):
    handle = model.blocks[1].up.register_forward_hook(lambda module, args, output: 1.5 * output)
    found = model(x)
    handle.remove()
    return found


def with_a_later_hook(model, x):
    found = model(x)
    model.blocks[1].up.register_forward_pre_hook(lambda module, args: (0.9 * args[0],))
    return found


def with_another_module(model, x):
    norm, model.blocks[1].norm = model.blocks[1].norm, torch.nn.Tanh()
    found = model(x)
    model.blocks[1].norm = norm
    return found


CASES = TRAINED | {"gradient penalty": penalty, "after a step": after_a_step, "a hook": with_a_hook}
CASES |= {"a later hook": with_a_later_hook, "another module": with_another_module}
del CASES["dual numbers"]  # whose tangents torch's checkpoints do not save: refused by torch


@pytest.mark.promise("recomputed-transforms")
@pytest.mark.parametrize("rows", [None, 2])
def test_each_equals_plain_torch(rows):
    """Two steps trained on the result, or one ordinary step after it."""
    x = toys.data(0, 0)
    for name, run in (CASES | VALUES).items():
        dense, plain, model, optimizer = kit.pair(toys.Stack, toys.sgd, seed=1)
        with offload_activations(model, policy="recompute", rows=rows, row_modules=["blocks.*"]):
            for _ in range(2):
                expected, found = run(dense, x), run(model, x)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=f"{name}: {{}}".format)
                for each, step, result in ((dense, plain, expected), (model, optimizer, found)):
                    kit.step(step, result.square().mean() if name in CASES else toys.loss_of(each, x))
        torch.testing.assert_close(values(model), values(dense), rtol=1e-4, atol=1e-5)

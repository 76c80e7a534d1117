"""Functions under torch.jit.script ask the classes of their arguments. Here a Python function stands for torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_core
from zero_core.runtime.parameter import Sharded
from zero_core.runtime.scripted import asking, see_calls
from zero_core.runtime.views import View


@pytest.fixture
def weight():
    model = nn.Linear(3, 2)
    zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model.weight


SEEN: list[type] = []


def call(function, *args, **kwargs):
    """As C++ calls: whatever class the tensors have."""
    given = [*args, *kwargs.values()]
    SEEN[:] = [type(each) for value in given for each in (value if isinstance(value, list) else [value])]
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


asked = asking(call)


def test_a_sharded_parameter_arrives_with_its_values(weight):
    values = weight.detach().clone()
    with torch.no_grad():
        assert torch.equal(asked(torch.add, weight, 1.0), values + 1.0)
        assert torch.equal(asked(torch.stack, [weight, weight.data]), torch.stack([values, values]))
        assert torch.equal(asked(torch.sum, input=weight), values.sum())
    assert not {Sharded, View} & set(SEEN)
    asked(torch.sum, weight).backward()
    assert torch.equal(zero_core.full_gradient(weight), torch.ones(2, 3))


def test_writes_reach_the_parameter(weight):
    values = weight.detach().clone()
    asked(torch.Tensor.mul_, weight.data, 2.0)
    asked(torch._foreach_add_, [*weight.data], 1.0)
    with torch.no_grad():
        assert asked(torch.Tensor.sub_, weight, weight.data) is weight
    assert torch.equal(weight.detach(), torch.zeros(2, 3)) and not torch.equal(values, torch.zeros(2, 3))


def test_other_arguments_go_straight_through():
    x = torch.ones(3)
    assert asked(torch.Tensor.view, x, [3]) is not None and SEEN == [torch.Tensor, int]
    assert float(asked(lambda tensors: tensors["a"].sum(), {"a": x})) == 3.0


def test_torch_is_told_once(weight):
    before = torch._C.ScriptFunction.__call__
    see_calls()
    assert torch._C.ScriptFunction.__call__ is before and before._asks

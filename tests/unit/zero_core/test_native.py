"""Functions of torch's that read memory in C++ get values in place of a parameter or gradient without memory.

The tests call Python functions. Torch's own would end the process if they were given a sharded parameter itself.
"""

import pytest
import torch
import torch.utils.dlpack
from torch import nn

import zero_core
from zero_core.errors import ChangedParameterError, ZeroError
from zero_core.tensors.native_functions import ABSENT, PLACES, asking, refuse
from zero_core.tensors.native_functions import values as in_memory
from zero_core.tensors.sharded_parameter import Sharded
from zero_core.tensors.writeback_views import View

SEEN: list[type] = []


@pytest.fixture
def weight():
    model = nn.Linear(3, 2)
    zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model.weight


def call(function, *args, **kwargs):
    """As C++ calls: whatever class the tensors have."""
    given = [*args, *kwargs.values()]
    SEEN[:] = [type(each) for value in given for each in (value if isinstance(value, list) else [value])]
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


asked = asking(call, ABSENT, in_memory)


@pytest.mark.promise("native-values")
def test_a_sharded_parameter_arrives_with_its_values(weight):
    values = weight.detach().clone()
    with torch.no_grad():
        assert torch.equal(asked(torch.add, weight, 1.0), values + 1.0)
        assert torch.equal(asked(torch.stack, [weight, weight.data]), torch.stack([values, values]))
        assert torch.equal(asked(torch.sum, input=weight), values.sum())
        assert torch.equal(asked(lambda tensors: tensors["w"][0].sum(), {"w": (weight,)}), values.sum())
    assert Sharded not in SEEN
    asked(torch.sum, weight).backward()
    assert torch.equal(zero_core.full_gradient(weight), torch.ones(2, 3))
    assert torch.equal(asked(torch.sum, weight.grad), torch.tensor(6.0))


@pytest.mark.promise("old-views")
def test_dlpack_is_refused_by_the_replacement(weight):
    """Never with torch's own function, which would make a tensor that ends the process."""
    seen = []
    refused = asking(seen.append, (*ABSENT, View), refuse)
    weight.sum().backward()
    for tensor in (weight, weight.data, weight.grad, weight.grad[0]):
        with pytest.raises(ZeroError, match=r"would share memory with a copy, .* Pass a clone"):
            refused(tensor)
    assert not seen
    refused(x := torch.ones(2))
    assert seen[0] is x
    assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)), x)


@pytest.mark.promise("old-views")
@pytest.mark.advice("copy the values, p.copy_(tensor)")
def test_parameters_are_not_swapped(weight):
    """torch's function also swaps what leads to the shards, and the next forward would end the process."""
    with pytest.raises(
        ZeroError, match=r"swap_tensors of weight, which is sharded: copy the values, p.copy_\(tensor\)"
    ):
        torch.utils.swap_tensors(nn.Parameter(torch.ones(2, 3)), weight)
    with torch.no_grad():
        weight.copy_(torch.ones(2, 3))
    assert torch.equal(weight, torch.ones(2, 3))


def test_another_class_over_the_values_is_a_view_of_them(weight):
    plain = weight.detach().as_subclass(torch.Tensor)
    plain.fill_(3.0)
    assert torch.equal(weight.detach(), torch.full((2, 3), 3.0))
    with torch.no_grad():
        weight.as_subclass(torch.Tensor).fill_(4.0)
    assert torch.equal(weight.detach(), torch.full((2, 3), 4.0))
    other = torch.zeros(2)
    with pytest.raises(ChangedParameterError, match="a view of .* cannot be replaced .* write it back with copy_"):
        other.set_(weight.data)


def test_every_method_of_a_view_is_that_of_a_tensor(weight):
    """But for what a view answers itself. Fails if a field of ours hides one."""
    own = {name for name in (*vars(View), *View.__annotations__) if not name.startswith("__")}
    own = {name for name in own if hasattr(torch.Tensor, name)}
    assert own == {"as_subclass", "cpu", "data", "numpy", "share_memory_", "storage", "to", "tolist", "untyped_storage"}


@torch.jit.script
def doubled(w: torch.Tensor):
    return (w * 2).sum()


@pytest.mark.promise("native-values")
def test_scripts_and_transforms_take_the_parameter_and_code_that_compiles_them_still_runs(weight):
    replaced = [getattr(owner, name) for owner, name, *_ in PLACES]
    assert all(hasattr(each, "__wrapped__") for each in replaced), "else the process would end below"
    values = weight.detach().clone()
    torch.testing.assert_close(doubled(weight), (values * 2).sum())
    torch.testing.assert_close(torch.func.grad(lambda w: w.square().sum())(weight), 2 * values)
    torch.testing.assert_close(torch.vmap(torch.sum)(weight), values.sum(1))
    compiled = torch.compile(torch.func.grad(lambda w: w.square().sum()), backend="eager")
    torch.testing.assert_close(compiled(values), 2 * values)
    compiled = torch.compile(lambda w: (w * 2).sum(), backend="eager")
    for tensor in (weight, weight.detach(), weight.data, values):
        torch.testing.assert_close(compiled(tensor), (values * 2).sum())
    compiled(weight).backward()
    torch.testing.assert_close(zero_core.full_gradient(weight), torch.full((2, 3), 2.0))
    torch.compiler.reset()

"""The change test: a collective of one's own is one file, examples/own_collective.py."""

import pytest
import torch

import zero_core
from examples.own_collective import Int8Gather
from tests import kit
from tests.conformance.zero_core.test_collectives import OnGloo
from tests.integration.zero_core import toys


class TestInt8Gather(OnGloo):
    collectives = Int8Gather
    dtypes = (torch.float32, torch.bfloat16)
    gather_tolerance = 0.5 / 127 + 2.0**-8  # half a step of int8, and a rounding to bf16


@pytest.mark.promise("own-collectives")
@kit.on_ranks(2, 3)
def test_a_model_trains_near_the_dense_one():
    """Losses, norms and masters are within 2 % of the reference's; where the gather is exact, within 1e-5."""
    toys.train(toys.Stack, steps=6, tolerance=0.02, collectives=Int8Gather)


@pytest.mark.promise("own-collectives")
@pytest.mark.parametrize("where", ["gathered", "outside"])
@kit.on_ranks(2)
def test_a_write_leaves_all_other_masters_as_they_were(where: str) -> None:
    """They would become what int8 made of them, if the values that were gathered were written back.

    Outside of gathered(), the parameter that was written is kept as it was shown, like one of 16 bits.
    """
    torch.manual_seed(1)
    model = toys.Stack()
    zero_core.shard(model, toys.adamw(model.parameters()), collectives=Int8Gather)
    before = kit.named_values(model, master=True)
    exact = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert not torch.equal(exact["head.weight"], before["head.weight"]), "the gather was exact"
    if where == "gathered":
        with zero_core.gathered(model), torch.no_grad():
            model.head.weight[0, 0] = 5.0
    else:
        model.head.weight.data[0, 0] = 5.0
    now = kit.named_values(model, master=True)
    assert now["head.weight"][0, 0] == 5.0
    if where == "gathered":
        assert int((now["head.weight"] != before["head.weight"]).sum()) == 1
    assert [name for name in now if not torch.equal(now[name], before[name])] == ["head.weight"]


@pytest.mark.promise("frozen-bits")
@kit.on_ranks(2)
def test_what_is_not_trained_arrives_with_all_bits():
    dense, model = kit.twins(toys.Stack)
    model.embed.requires_grad_(False)
    zero_core.shard(model, toys.adamw(model.parameters()), collectives=Int8Gather)
    with zero_core.gathered(model):
        assert torch.equal(model.embed.weight, dense.embed.weight)
        assert not torch.equal(model.head.weight, dense.head.weight)

"""A `shard` that fails leaves the user's model as it was, so that the next one works; or says what is lost.

Fails if any error between the first unit's handover and the end of `shard` leaves a parameter without its values.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_core.toys import Refused, Refusing
from zero_core.errors import StoreError, UnsupportedOptimizerError

pytestmark = pytest.mark.promise("failed-shard")


class Own(nn.Parameter):
    """A class of the user's, which deferred_init leaves alone."""


def make(deferred: bool, dtype: torch.dtype) -> nn.Module:
    """A stack with an LSTM, whose weights have weak references, and a frozen weight that is not contiguous."""

    torch.manual_seed(3)
    with zero_core.deferred_init(seed=3) if deferred else nullcontext():
        model = toys.Stack()
        model.lstm = nn.LSTM(3, 2)
        model.table = nn.Parameter(torch.randn(6, 4).t(), requires_grad=False)
    if not deferred:
        model.table = Own(model.table.data, requires_grad=False)
    return model.to(dtype)


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, check_stride=True)


@pytest.mark.advice("Build the model again before the next shard()")
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [0, 2, 99])
def test_a_store_that_fails_to_attach_leaves_the_model_as_it_was(at: int, dtype: torch.dtype, deferred: bool) -> None:
    model, expected = make(deferred, dtype), make(deferred, dtype)
    zero_core.materialise(expected)
    optimizer = toys.adamw(model.parameters())
    before = [(p, type(p)) for p in model.parameters()]
    with pytest.raises(Refused):
        zero_core.shard(model, optimizer, store=Refusing(at))
    assert all(a is p and type(p) is kind for (a, kind), p in zip(before, model.parameters(), strict=True))
    if deferred:
        assert all(p.is_meta for p in model.parameters())
    else:
        assert_same(values(model), values(expected))
    sharded = zero_core.shard(model, optimizer)
    with zero_core.gathered(model):
        assert all(torch.equal(a, b) for a, b in zip(values(model), values(expected), strict=True))
    kit.step(sharded, toys.loss_of(model, toys.data(0, 0).to(dtype)))
    sharded.close()


def test_an_error_after_the_store_was_attached_leaves_model_and_optimizer_as_they_were() -> None:
    model = toys.Stack()
    optimizer = toys.adamw(model.parameters())
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))
    before = values(model)
    optimizer.state[model.head.bias]["projection"] = torch.zeros(7)
    with pytest.raises(UnsupportedOptimizerError, match="projection"):
        zero_core.shard(model, optimizer, param_dtype=torch.bfloat16)
    assert_same(values(model), before)
    assert model(toys.data(0, 0)).isfinite().all()
    del optimizer.state[model.head.bias]["projection"]
    zero_core.shard(model, optimizer).close()


def test_values_that_are_lost_are_named_and_what_was_not_handed_over_stays() -> None:
    model, expected = make(False, torch.float32), make(False, torch.float32)
    optimizer = toys.adamw([p for p in model.parameters() if p.requires_grad])
    told = r"moved parameters \(table, embed\.\S+, .* and 4 more\) into the store.*The failure: Refused"
    with pytest.raises(StoreError, match=told) as raised:
        zero_core.shard(model, optimizer, store=Refusing(3, forgets=True))
    assert isinstance(raised.value.__cause__, Refused)
    lost = [name for name, p in model.named_parameters() if p.is_meta]
    assert 0 < len(lost) < len(list(model.parameters()))
    with pytest.raises(zero_core.errors.DeferredInitError, match="build the model"):
        zero_core.shard(model, toys.adamw(model.parameters()))
    there = dict(model.named_parameters())
    assert all(torch.equal(there[n], p) for n, p in expected.named_parameters() if n not in lost)


@kit.on_ranks(2)
def test_on_several_ranks_what_is_cut_is_lost_and_what_is_whole_is_not() -> None:
    for stage, error in ((0, Refused), (3, StoreError)):
        torch.manual_seed(0)
        model = toys.Stack()
        before = values(model)
        with pytest.raises(error):
            zero_core.shard(model, toys.adamw(model.parameters()), stage=stage, store=Refusing())
        assert any(p.is_meta for p in model.parameters()) == bool(stage)
        if not stage:
            assert_same(values(model), before)

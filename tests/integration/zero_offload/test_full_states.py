"""`optimizer.full_state_dict()` of states in host memory and on NVMe: torch's format, and the same bits from any tier.

Fails if the dict of a tiered run differs from the default store's in a bit, or if a run that goes on from it on another
tier, with CPU or torch updates, differs from one that was not interrupted.
"""

import pytest
import torch

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_core.test_full_states import same, shared, steps
from zero_offload import MemoryByteStore, OffloadError, TieredStore

PLACEMENTS = (
    {},
    {"optimizer": {"host": 0.5, "nvme": 0.5}},
    dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme"),
)


def tiered(build, place, dtype, stage):
    torch.manual_seed(0)
    model = toys.Frozen()
    placement = {"parameters": "host", "gradients": "host", "optimizer": "host"} | PLACEMENTS[place]
    store = TieredStore(**placement, nvme=MemoryByteStore())
    return model, zero_core.shard(model, build(model.parameters()), store=store, stage=stage, param_dtype=dtype)


def run(model, optimizer, first, last):
    for step in range(first, last):
        data = toys.data(step, 0).to(next(model.parameters()).dtype)
        kit.step(optimizer, toys.loss_of(model, data))


def equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            equal(found[key], value)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected) and found.dtype == expected.dtype
    else:
        assert found == expected


def go_on(build, dtype):
    model, optimizer = tiered(build, 0, dtype, 3)
    run(model, optimizer, 0, 2)
    found, weights = shared(optimizer.full_state_dict()), {n: v.clone() for n, v in model.state_dict().items()}
    run(model, optimizer, 2, 4)
    last = optimizer.full_state_dict()
    for place, stage in ((1, 2), (2, 3)):
        other, again = tiered(build, place, dtype, stage)
        run(other, again, 0, 1)
        other.load_state_dict(weights)
        equal({name: value.clone() for name, value in other.state_dict().items()}, dict(weights))
        again.load_state_dict(found)
        run(other, again, 2, 4)
        equal(again.full_state_dict(), last)
        again.close()
    optimizer.close()
    if last and dtype == torch.float32:
        torch.manual_seed(0)
        dense = toys.Frozen()
        theirs = build(dense.parameters())
        steps(dense, theirs, 0, 4)
        same(last["state"], theirs.state_dict()["state"])


@pytest.mark.promise("full-state-bits")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_travel_between_tiers(ranks, dtype, size):
    ranks(size).run(go_on, toys.adamw, dtype)


@pytest.mark.promise("full-state-bits")
def test_momentum_travels_between_tiers():
    go_on(toys.sgd, torch.bfloat16)


@pytest.mark.promise("states-in-part")
def test_a_model_that_sleeps_says_so():
    model, optimizer = tiered(toys.adamw, 2, torch.float32, 3)
    run(model, optimizer, 0, 1)
    found = optimizer.full_state_dict()
    zero_core.sleep(model)
    for call in (model.state_dict, optimizer.full_state_dict, lambda: optimizer.load_state_dict(found)):
        with pytest.raises(OffloadError, match=r"sleeps: call zero_core.wake\(model\)"):
            call()
    zero_core.wake(model)
    equal(optimizer.full_state_dict(), found)
    optimizer.close()

"""A disk that fails while `shard` writes the first values leaves the user's model as it was.

Fails if the model's values are only in a store that has failed and was closed.
"""

import pytest
import torch

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_offload import MemoryByteStore, OffloadError, SwapError, TieredStore
from zero_offload.testing import FaultyByteStore


@pytest.mark.promise("io-error-attach")
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("after", [0, 2])
def test_a_disk_that_fails_at_shard_leaves_the_model_as_it_was(after: int, deferred: bool) -> None:
    if deferred:
        with zero_core.deferred_init(seed=0):
            model = toys.Stack()
    else:
        model = toys.Stack()
    before = [None if p.is_meta else p.detach().clone() for p in model.parameters()]
    optimizer = toys.adamw(model.parameters())
    disk = FaultyByteStore(MemoryByteStore())
    disk.fail("write", after=after)
    with pytest.raises(SwapError, match="writing"):
        zero_core.shard(model, optimizer, store=TieredStore("nvme", "nvme", "nvme", disk))
    for parameter, value in zip(model.parameters(), before, strict=True):
        assert parameter.is_meta if value is None else torch.equal(parameter, value)
    store = TieredStore("nvme", "nvme", "nvme", MemoryByteStore())
    sharded = zero_core.shard(model, optimizer, store=store)
    loss = toys.loss_of(model, toys.data(0, 0))
    kit.step(sharded, loss)
    with zero_core.gathered(model):
        assert deferred or not all(torch.equal(p, v) for p, v in zip(model.parameters(), before, strict=True))
    sharded.close()


@pytest.mark.promise("second-store")
def test_a_store_that_a_model_has_is_refused_to_another_and_stays_open() -> None:
    torch.manual_seed(0)
    first, second = toys.Stack(), toys.Stack()
    store = TieredStore("host", "host", "host")
    optimizer = zero_core.shard(first, toys.sgd(first.parameters()), store=store)
    with pytest.raises(OffloadError, match="has a model already: make a new one"):
        zero_core.shard(second, toys.sgd(second.parameters()), store=store)
    before = [p.detach().clone() for p in first.parameters()]
    toys.loss_of(first, toys.data(0, 0)).backward()
    optimizer.step()
    assert not all(torch.equal(p.detach(), q) for p, q in zip(first.parameters(), before, strict=True))
    other = zero_core.shard(second, toys.sgd(second.parameters()), store=TieredStore("host", "host", "host"))
    toys.loss_of(second, toys.data(0, 0)).backward()
    other.step()
    optimizer.close(), other.close()

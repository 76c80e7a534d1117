"""Advice of errors in the middle of a run, or of a machine without room: each test does what the error says."""

import errno
import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.chunks import TILE
from tests.swap import needs_swap
from tests.unit.zero_offload import simulated
from zero_offload import BudgetError, CompressedByteStore, MemoryByteStore, OffloadError, TieredStore
from zero_offload.memory import arena
from zero_offload.memory.host_registration import register
from zero_offload.store import attached_store

pytestmark = pytest.mark.usefixtures("small_chunks")

WIDTH = 192


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def sharded(tiers="host", nvme=None, **options):
    """A model, and its optimizer whose store has everything on `tiers`, or each kind on its own."""
    kinds = (tiers,) * 3 if isinstance(tiers, str) else tiers
    net = model()
    store = TieredStore(*kinds, nvme=nvme or MemoryByteStore(), tile_numel=TILE, **options)
    return net, zero_core.shard(net, torch.optim.AdamW(net.parameters(), lr=0.1), store=store)


@pytest.mark.promise("store-advice")
def test_a_full_compressed_store_gets_more_room_or_less():
    pytest.importorskip("zstandard")

    def stored(capacity_gib, nbytes):
        store = CompressedByteStore(capacity_gib=capacity_gib, ratio=16.0)
        store.reserve(nbytes)
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)  # does not compress
        extent = store.allocate(nbytes)
        store.write(extent, data).wait()
        back = torch.empty_like(data)
        store.read(extent, back).wait()
        assert torch.equal(back, data)
        store.close()

    with pytest.raises(BudgetError, match="raise capacity_gib, or place less here"):
        stored(2**-14, 1 << 17)
    stored(2**-12, 1 << 17)
    stored(2**-14, 1 << 15)


def mapped(patch, refuse):
    def limited(descriptor, nbytes, **options):
        refuse(nbytes, OSError(errno.ENOMEM, "Cannot allocate memory"))
        return mmap.mmap(descriptor, nbytes, **options)

    patch.setattr(arena, "mmap", SimpleNamespace(**{**vars(mmap), "mmap": limited}))
    return {}


def pinned(patch, refuse):
    empty = torch.empty

    def limited(nbytes, *, pin_memory=False, **options):
        if pin_memory:
            refuse(nbytes, RuntimeError("cannot allocate"))
        return empty(nbytes, **options)

    patch.setattr(torch, "empty", limited)
    patch.setattr(
        attached_store, "arena_of", lambda device, nbytes, budget: arena.Arena(nbytes, pinned=True, budget=budget)
    )
    return {}


def registered(patch, refuse):
    def limited(address, nbytes, flags):
        try:
            refuse(nbytes, MemoryError())
        except MemoryError:
            return 2
        return 0

    patch.setattr(torch.cpu, "cudart", lambda: SimpleNamespace(cudaHostRegister=limited), raising=False)
    patch.setattr(torch.cpu, "device", lambda _: nullcontext(), raising=False)

    def streams(host):
        register(host, torch.device("cpu"))
        return simulated.SimulatedStreams(host)

    return {"streams": streams}


@pytest.mark.promise("store-advice")
@pytest.mark.parametrize("memory", [mapped, pinned, registered])
def test_memory_that_the_machine_refuses_is_made_less(monkeypatch, memory):
    asked, limit = [], [1 << 60]

    def refuse(nbytes, error):
        asked.append(nbytes)
        if nbytes > limit[0]:
            raise error

    options = memory(monkeypatch, refuse)
    many = {"tiers": ("host", "host", "nvme"), "slots": 40}
    ways = [many | {"slots": 3}, many | {"tiers": "nvme", "slots": 3}]
    for way in ways:
        sharded(**way, **options)
    limit[0] = max(asked)
    with pytest.raises(OffloadError, match="put more on nvme"):
        sharded(**many, **options)
    for way in ways:
        sharded(**way, **options)
    limit[0] *= 8
    sharded(**many, **options)


@pytest.mark.promise("slots-held")
@needs_swap
def test_units_that_a_graph_holds_get_slots_or_are_on_the_host():
    """The gradient penalty: the first backward keeps every unit until the step, also at stage 3."""

    def made():
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    def train(net, optimizer):
        x = torch.ones(1, 8, requires_grad=True)
        (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        kit.step(optimizer, slope.square().sum())

    def stored(parameters="nvme", **options):
        net, optimizer = made()
        store = TieredStore(parameters, "nvme", "nvme", nvme=MemoryByteStore())
        optimizer = zero_core.shard(net, optimizer, store=store, units=[nn.Sequential], **options)
        try:
            train(net, optimizer)
            return kit.values(net)
        finally:
            optimizer.close()

    with pytest.raises(BudgetError, match="raise prefetch_bytes to the bytes of all units that are held together"):
        stored(prefetch_bytes=0)
    net, optimizer = made()
    train(net, optimizer)
    for found in (stored(prefetch_bytes=6 * 4 * 72), stored("host", prefetch_bytes=0)):
        torch.testing.assert_close(found, [parameter.detach() for parameter in net.parameters()])

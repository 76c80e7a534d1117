"""Advice of errors in the middle of a run, or of a machine without room: each test does what the error says."""

from __future__ import annotations

import errno
import mmap
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.chunks import TILE
from tests.swap import needs_swap
from tests.unit.zero_offload import simulated
from zero_core import checkpoint
from zero_offload import (
    BudgetError,
    CompressedByteStore,
    HostBudget,
    MemoryByteStore,
    OffloadError,
    TieredStore,
    arena,
    attached,
)
from zero_offload.device import register
from zero_offload.testing import FaultyByteStore

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


def step(net, optimizer, number=1):
    kit.step(optimizer, net(torch.full((2, WIDTH), float(number))).square().mean())


def values(net):
    return kit.values(net)


def same(net, other):
    assert all(map(torch.equal, values(net), values(other)))


def resumed(folder, steps):
    """The model of a run that goes on from the checkpoint and takes the steps, beside one that was never ended."""
    (net, optimizer), (whole, other) = sharded("nvme"), sharded()
    checkpoint.load(folder, net, optimizer)
    step(whole, other)
    for number in steps:
        step(net, optimizer, number)
        step(whole, other, number)
    same(net, whole)


@pytest.mark.parametrize("fault", ["read", "write"])
def test_a_transfer_that_fails_is_resumed_from_the_last_checkpoint(tmp_path, fault):
    nvme = FaultyByteStore(MemoryByteStore())
    net, optimizer = sharded("nvme", nvme, slots=3)
    step(net, optimizer)
    checkpoint.save(tmp_path, net, optimizer)
    nvme.fail(fault)
    with pytest.raises(OffloadError, match="check the device and its free space, then resume from the last checkpoint"):
        step(net, optimizer, 2)
        step(net, optimizer, 3)
    with suppress(OffloadError):  # it may say again what failed
        optimizer.close()
    resumed(tmp_path, [2, 3])


def test_a_thread_that_cannot_be_started_is_made_room_for(tmp_path, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    net, optimizer = sharded("nvme")
    step(net, optimizer)
    checkpoint.save(tmp_path, net, optimizer)
    net, optimizer = sharded("nvme")
    checkpoint.load(tmp_path, net, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        advice = r"close the optimizer, free threads \(ulimit -u\), and resume from the last checkpoint"
        with pytest.raises(OffloadError, match=advice):
            step(net, optimizer, 2)
    optimizer.close()
    resumed(tmp_path, [2])


@pytest.mark.parametrize("way", ["make room there", "another ByteStore"])
def test_a_store_sleeps_where_there_is_room(way):
    keeper = MemoryByteStore(capacity_bytes=1 << 23)
    taken = keeper.allocate((1 << 23) - 8192)
    net, optimizer = sharded()
    other = sharded()
    for each in (net, optimizer), other:
        step(*each)
    with pytest.raises(OffloadError, match="has lost nothing: make room there, or give sleep.to=. another ByteStore"):
        zero_core.sleep(net, keeper)
    for each in (net, optimizer), other:
        step(*each)
    if way == "make room there":
        keeper.free(taken)
        zero_core.sleep(net, keeper)
    else:
        zero_core.sleep(net, MemoryByteStore())
    zero_core.wake(net)
    for each in (net, optimizer), other:
        step(*each)
    same(net, other[0])


@pytest.mark.parametrize("way", ["sleep", "close"])
def test_a_shared_budget_is_given_back(way):
    budget = HostBudget(1 << 40)
    net, optimizer = sharded(host_bytes=budget)
    budget.nbytes = (budget.nbytes - budget.free_bytes) * 3 // 2
    with pytest.raises(BudgetError, match=r"sleep\(\) or close\(\) of one of them gives its bytes back"):
        sharded(host_bytes=budget)
    if way == "sleep":
        zero_core.sleep(net, MemoryByteStore())
    else:
        optimizer.close()
    step(*sharded(host_bytes=budget))


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
    patch.setattr(attached, "arena_of", lambda device, nbytes, budget: arena.Arena(nbytes, pinned=True, budget=budget))
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
            return values(net)
        finally:
            optimizer.close()

    with pytest.raises(BudgetError, match="raise prefetch_bytes to the bytes of all units that are held together"):
        stored(prefetch_bytes=0)
    net, optimizer = made()
    train(net, optimizer)
    for found in (stored(prefetch_bytes=6 * 4 * 72), stored("host", prefetch_bytes=0)):
        torch.testing.assert_close(found, [parameter.detach() for parameter in net.parameters()])

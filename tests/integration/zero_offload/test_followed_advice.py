"""Advice of zero-offload that is followed: each test makes a mistake, does what the error says, and that works."""

import errno
import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("zero_optim_cpu")

import zero_core
import zero_offload
import zero_optim_cpu
from tests import kit
from tests.chunks import TILE
from tests.integration.zero_offload.training import tiered
from tests.swap import needs_swap
from tests.unit.zero_offload import simulated
from zero_core.errors import UnsupportedOptimizerError
from zero_offload import BudgetError, CompressedByteStore, Hardware, MemoryByteStore, OffloadError, TieredStore, plan
from zero_offload.memory import arena
from zero_offload.memory.host_registration import register


def backward(net):
    net(torch.ones(1, 4)).sum().backward()


@pytest.mark.advice("set fields of Hardware, such as", "needs units that are recomputed, and")
@pytest.mark.parametrize(
    ("wrong", "advice", "ways"),
    [
        (lambda: Hardware(nvme_read_gbps=0), "leave it out if it is not known", [lambda: Hardware()]),
        (
            lambda: Hardware(tiers={"nvme": {"gib": 3}}),
            "tiers cannot describe 'nvme'; set fields of Hardware, such as nvme_gib",
            [lambda: Hardware(nvme_gib=3, tiers={"nvme": {}})],
        ),
        (
            lambda: plan([8, 8], rows=2, activations="host"),
            "give the rows of one micro-batch as well",
            [lambda: plan([8, 8], rows=2, micro_batch=4, activations="host", tokens=8)],
        ),
        (
            lambda: plan([8, 8], rows=2, micro_batch=4, activations="keep", tokens=8),
            "or leave rows out",
            [
                lambda: plan([8, 8], micro_batch=4, activations="keep", tokens=8),
                *(
                    lambda policy=policy: plan([8, 8], rows=2, micro_batch=4, activations=policy, tokens=8)
                    for policy in ("recompute", "host", "nvme", "auto")
                ),
            ],
        ),
        (
            lambda: plan([8, 8], activations=["keep"], tokens=8),
            " activation policies for 2 units: give one per unit, or one for all",
            [lambda each=each: plan([8, 8], activations=each, tokens=8) for each in ("keep", ["keep", "recompute"])],
        ),
        (
            lambda: TieredStore(tiers={"host": MemoryByteStore()}),
            "give this one another name",
            [lambda: TieredStore(tiers={"shelf": MemoryByteStore()}).close()],
        ),
    ],
)
def test_arguments_that_an_error_names_pass(wrong, advice, ways):
    with pytest.raises(ValueError) as raised:
        wrong()
    assert advice in str(raised.value)
    for way in ways:
        way()


@pytest.mark.advice("give it more room (hardware.tiers")
@pytest.mark.parametrize(
    ("small", "advice", "large"),
    [
        ({"nvme_gib": 0.001}, "hardware.nvme_gib, hardware.nvme_paths", {"nvme_gib": 1}),
        ({"nvme_gib": 0.001}, "hardware.nvme_gib, hardware.nvme_paths", {"nvme_gib": 0.001, "nvme_paths": 500}),
        (
            {"tiers": {"nvme": {}, "shelf": {"gib": 0.001}}},
            "hardware.tiers.shelf.gib",
            {"tiers": {"shelf": {"gib": 1}}},
        ),
    ],
)
def test_a_tier_gets_the_room_that_a_plan_asks_for(small, advice, large):
    where = dict.fromkeys(("parameters", "gradients"), "host") | {"optimizer": "shelf" if "tiers" in small else "nvme"}
    with pytest.raises(zero_offload.PlanError) as raised:
        plan([1 << 20] * 4, Hardware(host_gib=8, **small), **where)
    assert advice in str(raised.value)
    plan([1 << 20] * 4, Hardware(host_gib=8, **large), **where)


@pytest.mark.advice("pass step= an UpdateStep that supports it")
def test_a_step_that_does_not_know_the_optimizer_is_changed_for_one_that_does():
    class Mine(torch.optim.Adagrad):
        pass

    def sharded(step, kind=Mine, **options):
        net = nn.Sequential(nn.Linear(4, 4))
        return net, zero_core.shard(net, kind(net.parameters()), store=TieredStore(step=step), **options)

    with pytest.raises(TypeError, match=r"TorchStep does not know .*Mine; .* parameter at a time, say so by shard\("):
        zero_offload.TorchStep().bind(Mine([nn.Parameter(torch.zeros(2))]))
    with pytest.raises(UnsupportedOptimizerError, match=r"Mine has no .*does: optimizer_contract="):
        sharded(zero_offload.TorchStep())
    for net, optimizer in (
        sharded(zero_optim_cpu.CpuStep(threads=1), torch.optim.Adagrad),
        sharded(zero_offload.TorchStep(), optimizer_contract="by itself"),
    ):
        backward(net)
        optimizer.step()


# -- in the middle of a run, or on a machine without room --------------------------------------------------------------


WIDTH = 192


def sharded(tiers="host", nvme=None, **options):
    """A model, and its optimizer whose store has everything on `tiers`, or each kind on its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    store = tiered(*([tiers] if isinstance(tiers, str) else tiers), nvme=nvme, tile_numel=TILE, **options)
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

    with pytest.raises(BudgetError, match="raise capacity_gib, or place less on this tier"):
        stored(2**-14, 1 << 17)
    stored(2**-12, 1 << 17)
    stored(2**-14, 1 << 15)


def mapped(patch, refuse):
    def limited(descriptor, nbytes, **options):
        refuse(nbytes, OSError(errno.ENOMEM, "Cannot allocate memory"))
        return mmap.mmap(descriptor, nbytes, **options)

    patch.setattr(arena, "mmap", SimpleNamespace(**{**vars(mmap), "mmap": limited}))
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
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("memory", [mapped, registered])
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
    with pytest.raises(
        OffloadError, match='put optimizer, gradients or parameters on "nvme". Or use fewer slots: set slots=3'
    ):
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

    with pytest.raises(BudgetError, match='set parameters="host". Or raise prefetch_bytes to the bytes of all units'):
        stored(prefetch_bytes=0)
    net, optimizer = made()
    train(net, optimizer)
    for found in (stored(prefetch_bytes=6 * 4 * 72), stored("host", prefetch_bytes=0)):
        torch.testing.assert_close(found, [parameter.detach() for parameter in net.parameters()])

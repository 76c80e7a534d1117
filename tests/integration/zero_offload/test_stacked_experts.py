"""Stacked experts in groups on slower tiers: the same bits on host and NVMe, and activations away from the device."""

import random

import pytest
import torch

pytest.importorskip("zero_optim_cpu")

import zero_core
import zero_offload
from tests import kit
from tests.integration.zero_core import mixtures
from tests.integration.zero_core.mixtures import GROUP, adamw, close, grouped, loss_of
from tests.unit.zero_offload.simulated import simulated_device, streams
from zero_offload import GenerationError, MemoryByteStore, TieredStore, TorchStep, write_checkpoint
from zero_offload.testing import CrashByteStore
from zero_optim_cpu import CpuStep

pytestmark = pytest.mark.promise("experts-same-bits")


def run(tier, policy=None, prefetch_bytes=0, **options):
    """Losses of three steps and the masters after them."""
    model = mixtures.qwen(use_cache=False)
    store = TieredStore(tier, tier, tier, nvme=MemoryByteStore(), step=TorchStep()) if tier else None
    optimizer = zero_core.shard(
        model, adamw(model.parameters()), store=store, expert_bytes=GROUP, prefetch_bytes=prefetch_bytes, **options
    )
    assert len(grouped(model)) > 2
    if policy is not None:
        zero_offload.offload_activations(model, store, policy)
    losses = [float(kit.step(optimizer, loss_of(model, mixtures.share(step)[0]))) for step in range(3)]
    found = losses, kit.named_values(model, master=True)
    optimizer.close()
    return found


OPTIONS = {
    "fp32": {},
    "clipped": {"max_grad_norm": 0.05},
    "bf16": {"param_dtype": torch.bfloat16},
    "in backward": {"update_in_backward": True},
    "ahead": {"prefetch_bytes": 1 << 20},
}


@pytest.mark.parametrize("option", OPTIONS)
@kit.on_ranks(1, 2)
def test_host_and_nvme_give_the_same_bits(option):
    losses, host = run("host", **OPTIONS[option])
    again, nvme = run("nvme", **OPTIONS[option])
    assert losses == again
    for name, value in host.items():
        assert torch.equal(value, nvme[name]), name


@pytest.mark.parametrize("policy", ["recompute", "host", "nvme"])
@kit.on_ranks(1, 2)
def test_activations_away_from_the_device_change_nothing(policy):
    losses, kept = run("nvme")
    again, away = run("nvme", policy)
    assert losses == pytest.approx(again, rel=1e-6)
    for name, value in kept.items():
        close(away[name], value)


PLACES = {
    "all on nvme": ("nvme", "nvme", "nvme"),
    "parameters on the device": ("device", "host", "nvme"),
    "mixed": ({"device": 0.4, "host": 0.6}, {"device": 0.4, "host": 0.6}, {"device": 0.4, "nvme": 0.6}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ahead", [0, 1 << 20])
def test_a_discrete_device_gets_the_bits_of_host_memory(place, ahead):
    """Blocks hold a landing buffer for their gradient, while those of their groups come and go."""
    wanted, host = run("host", prefetch_bytes=ahead)
    with simulated_device():
        model = mixtures.qwen()
        store = TieredStore(*PLACES[place], nvme=MemoryByteStore(), step=TorchStep(), streams=streams())
        optimizer = zero_core.shard(
            model, adamw(model.parameters()), store=store, expert_bytes=GROUP, prefetch_bytes=ahead
        )
        losses = [float(kit.step(optimizer, loss_of(model, step))) for step in range(3)]
        found = kit.named_values(model, master=True)
        optimizer.close()
    assert losses == pytest.approx(wanted, rel=0 if place != "mixed" else 1e-6)
    for name, value in host.items():
        if place == "mixed":  # what the device updates it may round otherwise
            close(value, found[name])
        else:
            assert torch.equal(value, found[name]), name


def durable(disk, expert_bytes=GROUP):
    """The model, the optimizer, the store and what was gone on from, of a durable run on `disk`."""
    model = mixtures.qwen()
    store = TieredStore("nvme", "nvme", "nvme", nvme=disk, step=TorchStep(), durable=True)
    optimizer = zero_core.shard(
        model, adamw(model.parameters()), store=store, expert_bytes=expert_bytes, max_grad_norm=0.05
    )
    return model, optimizer, store, zero_core.resume(model, optimizer)


def test_a_killed_run_goes_on_from_its_groups_with_the_same_bits(tmp_path):
    wanted, _ = run("nvme", max_grad_norm=0.05)
    disk, generator = CrashByteStore(), random.Random(0)
    model, optimizer, store, begun = durable(disk)
    losses = [float(kit.step(optimizer, loss_of(model, step))) for step in range(2)]
    zero_core.commit(model)
    store.committed()
    model, again, _, resumed = durable(disk.crashed(generator))
    assert (begun.step, resumed.step) == (0, 2)
    losses.append(float(kit.step(again, loss_of(model, 2))))
    assert losses == wanted
    with pytest.raises(GenerationError, match="trained units: 13, now 21"):
        durable(disk.crashed(generator), expert_bytes=60_000)
    optimizer.close()
    again.close()
    left = disk.crashed(generator)  # and with other groups it goes on from a checkpoint
    write_checkpoint([left], tmp_path, step=TorchStep(), optimizer=adamw([torch.nn.Parameter(torch.zeros(1))]))
    other = mixtures.qwen(seed=1)
    optimizer = zero_core.shard(other, adamw(other.parameters()), expert_bytes=60_000, max_grad_norm=0.05)
    assert zero_core.checkpoint.load(tmp_path, other, optimizer).step == 2
    assert float(kit.step(optimizer, loss_of(other, 2))) == pytest.approx(wanted[2], rel=1e-6)
    optimizer.close()


def test_a_step_that_recomputes_reads_what_is_planned():
    """Twice a step, as groups are run again one at a time. Nothing waits for the updates between steps, which would
    run ahead of the next forward and read parameters for themselves."""
    model = mixtures.qwen(use_cache=False)
    where, options = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme"), {"expert_bytes": GROUP}
    options["prefetch_bytes"] = 0
    planned = zero_offload.plan(model, activations="recompute", parameter_dtype=torch.float32, **where, **options)
    store = TieredStore(**where, nvme=MemoryByteStore(), step=CpuStep(), slots=planned.slots)
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store, **options)
    zero_offload.offload_activations(model, store, "recompute")
    for step in range(8):
        if step == 2:
            before = store.stats()["nvme_read_bytes"]
        kit.step(optimizer, loss_of(model, mixtures.share(step)[0]))
    read = (store.stats()["nvme_read_bytes"] - before) / 6
    assert 0.85 * planned.read_bytes_per_step <= read <= planned.read_bytes_per_step
    optimizer.close()

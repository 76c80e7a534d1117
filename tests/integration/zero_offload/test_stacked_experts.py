"""Stacked experts in groups on slower tiers: the same bits on host and NVMe, and activations away from the device."""

import pytest
import torch

import zero_core
import zero_offload
from tests import kit
from tests.integration.zero_core import mixtures
from tests.integration.zero_core.mixtures import GROUP, adamw, close, grouped, loss_of
from zero_offload import MemoryByteStore, TieredStore, TorchStep


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

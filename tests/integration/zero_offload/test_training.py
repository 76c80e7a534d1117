"""A real model through zero_core.shard: the same bits on host and nvme, near DeviceStore's, on 1 and 2 ranks.

Fails if a unit's hand-over, its gradients or the order of its updates depend on where its shards are.
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_offload.training import Case, Outcome, train
from zero_core.gradients.loss_scaling import LossScale
from zero_offload import MemoryByteStore, TieredStore, TorchStep

EVERYWHERE = ["nvme", {"host": 0.5, "nvme": 0.5}, {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}]


def equal(left: Outcome, right: Outcome) -> bool:
    return (
        left.losses == right.losses
        and left.norms == right.norms
        and all(torch.equal(left.parameters[name], right.parameters[name]) for name in right.parameters)
    )


@pytest.mark.promise("accumulation-tiers")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_same_bits_over_tiers(ranks: Any, size: int, accumulate: int) -> None:
    """Through slots in which none of eight tiles stays, two of them, and all."""
    expected = ranks(size).run(train, Case("host", overlap=False, accumulate=accumulate, layers=5))
    for number, (placement, slots) in enumerate(product(EVERYWHERE, (3, 6, 40))):
        case = Case(placement, overlap=number != 1, accumulate=accumulate, layers=5, store={"slots": slots})
        for mine, theirs in zip(ranks(size).run(train, case), expected, strict=True):
            assert equal(mine, theirs), (placement, slots)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_other_stages(ranks: Any, stage: int) -> None:
    """Parameters on the host: below stage 3 they are whole in memory anyway."""
    placement = {"parameters": "host", "gradients": "host", "optimizer": "nvme"}
    expected = ranks(2).run(train, Case("host", stage=stage))[0]
    assert equal(ranks(2).run(train, Case(placement, stage=stage))[0], expected)


@pytest.mark.promise("units-on-some-ranks")
@pytest.mark.parametrize("stage", [0, 1, 2])
@kit.on_ranks(2)
def test_units_that_only_some_ranks_run_train_over_tiers(stage):
    store = TieredStore("host", "host", {"host": 0.5, "nvme": 0.5}, nvme=MemoryByteStore(), step=TorchStep())
    toys.train(toys.Sometimes, steps=9, stage=stage, store=store, find_unused_parameters=True)


@pytest.mark.promise("frozen-moves-parameters")
def test_frozen_layers_stream_parameters_only(ranks: Any) -> None:
    frozen = ("embedding", "layers.0", "layers.1")
    expected = ranks(1).run(train, Case("host", frozen=frozen))[0]
    found = ranks(1).run(train, Case("nvme", frozen=frozen))[0]
    assert equal(found, expected)
    torch.manual_seed(0)
    whole = ranks(1).run(train, Case("nvme"))[0]
    assert found.stats["nvme_write_bytes"] < 0.6 * whole.stats["nvme_write_bytes"]


@pytest.mark.parametrize("size", [1, 2])
def test_updates_in_backward_have_the_bits_of_updates_after_it(ranks: Any, size: int) -> None:
    plain = {"max_grad_norm": None}
    expected = ranks(size).run(train, Case("host", shard=plain))
    for placement in ("host", "nvme"):
        found = ranks(size).run(train, Case(placement, shard=plain | {"update_in_backward": True}))
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.losses == theirs.losses
            assert all(torch.equal(mine.parameters[name], theirs.parameters[name]) for name in theirs.parameters)


def test_loss_scaling_skips_and_recovers(ranks: Any) -> None:
    """fp16 with a scale that overflows at first: those steps change nothing, with and without nvme alike."""

    def run(placement: str) -> Outcome:
        scaled = {"param_dtype": torch.float16, "loss_scale": LossScale(2.0**19)}
        return ranks(1).run(train, Case(placement, steps=6, shard=scaled))[0]

    expected, found = run("host"), run("nvme")
    assert not all(map(math.isfinite, expected.norms)) and math.isfinite(expected.norms[-1])
    assert found.losses == expected.losses
    assert all(torch.equal(found.parameters[name], value) for name, value in expected.parameters.items())


@pytest.mark.promise("inference-in-flight")
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_evaluation_under_inference_mode_over_nvme(prefetch_bytes):
    """What the tier makes meanwhile is written by its own thread afterwards, which inference tensors do not allow."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    everything = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
    store = TieredStore(nvme=MemoryByteStore(), step=TorchStep(), tile_numel=1 << 20, **everything)
    optimizer = zero_core.shard(
        model, torch.optim.AdamW(model.parameters()), store=store, prefetch_bytes=prefetch_bytes
    )
    for _ in range(2):
        kit.step(optimizer, model(torch.ones(2, 8)).square().mean())
        with torch.inference_mode():  # updates are still under way
            assert model(torch.ones(2, 8)).isfinite().all()
    optimizer.close()


@pytest.mark.promise("inference-writes")
def test_a_write_in_a_forward_under_inference_mode_reaches_states_on_nvme():
    """The store reads the master's tile to change it, into memory that its own threads go on writing to."""

    class Clamping(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Clamping(8, 8) for _ in range(2)))
    store = TieredStore("device", "device", "nvme", nvme=MemoryByteStore(), step=TorchStep(), tile_numel=1 << 20)
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store)
    with torch.inference_mode():
        model(torch.ones(2, 8))
        model[0].bias.copy_(model[0].bias * 0 + 2)  # outside of its forward: the values go straight to the store
    with zero_core.gathered(model, master=True):
        assert all(layer.weight.abs().max() == 0.1 for layer in model)
        assert model[0].bias.tolist() == [2.0] * 8
    optimizer.close()


@pytest.mark.promise("shared-memory")
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_an_attribute_over_a_parameter_follows_it_on_a_tier(tier: str) -> None:
    """Fails if the attribute shows the memory that the parameter had, or another than the one that was read."""

    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.kept = [self.first.weight.detach(), self.last.weight.data]

        def forward(self, x: Tensor) -> Tensor:
            return (self.last(torch.tanh(self.first(x))) @ self.kept[1]) @ self.kept[0].t()

    def run(model: nn.Module, optimizer: Any) -> list[Tensor]:
        found = []
        for _ in range(4):
            found.append(kit.step(optimizer, model(torch.linspace(-1, 1, 32).view(4, 8)).square().sum()))
        return found

    dense, model = Shown(), Shown()
    expected = run(dense, torch.optim.Adam(dense.parameters(), lr=0.02))
    store = TieredStore(tier, tier, tier, nvme=MemoryByteStore(), step=TorchStep())
    optimizer = zero_core.shard(
        model, torch.optim.Adam(model.parameters(), lr=0.02), store=store, units=[nn.Linear], resident_bytes=0
    )
    torch.testing.assert_close(run(model, optimizer), expected, rtol=1e-4, atol=1e-5)
    optimizer.close()

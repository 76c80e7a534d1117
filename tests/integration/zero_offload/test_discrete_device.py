"""Training with a discrete device, simulated: the bits are those of training in host memory.

Copies are as late as zero-core's and the store's waits allow, and what has not arrived is NaN. Fails if a unit is
computed with before it is there, or memory is used anew while something is still copied from it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero_core
from tests.chunks import TILE
from tests.integration.zero_offload.test_training import equal
from tests.integration.zero_offload.training import Case, Model, Outcome, train
from tests.unit.zero_offload.simulated import simulated_device, streams
from zero_offload import TieredStore, TorchStep

STREAMED = {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}


def discrete(case: Case, seed: int = 0) -> Outcome:
    with simulated_device(seed):
        return train(case)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_same_bits_as_in_host_memory(ranks: Any, size: int, accumulate: int) -> None:
    expected = ranks(size).run(train, Case("host", accumulate=accumulate))
    for seed, placement in enumerate(["host", "nvme", {"host": 0.5, "nvme": 0.5}, STREAMED]):
        case = Case(placement, accumulate=accumulate, store={"slots": 3})
        for mine, theirs in zip(ranks(size).run(discrete, case, seed), expected, strict=True):
            assert equal(mine, theirs), placement


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_other_stages(ranks: Any, stage: int) -> None:
    expected = ranks(2).run(train, Case("host", stage=stage, accumulate=2))[0]
    assert equal(ranks(2).run(discrete, Case("host", stage=stage, accumulate=2))[0], expected)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_updates_in_backward(ranks: Any, size: int, placement: str) -> None:
    shard = {"max_grad_norm": None, "update_in_backward": True}
    expected = ranks(size).run(train, Case("host", shard=shard))
    for mine, theirs in zip(ranks(size).run(discrete, Case(placement, shard=shard)), expected, strict=True):
        assert equal(mine, theirs)


@pytest.mark.parametrize(
    "shard",
    [{"prefetch_bytes": 0}, {"prefetch_bytes": 1 << 30}, {"resident_bytes": 1 << 30}, {"resident_bytes": 5 * TILE}],
    ids=str,
)
def test_whatever_is_asked_for_ahead_or_stays(ranks: Any, shard: dict[str, int]) -> None:
    for size in (1, 2):
        expected = ranks(size).run(train, Case("host", layers=5))[0]
        assert equal(ranks(size).run(discrete, Case("nvme", layers=5, shard=shard))[0], expected)


def test_frozen_layers(ranks: Any) -> None:
    case = {"frozen": ("embedding", "layers.0", "layers.1")}
    expected = ranks(1).run(train, Case("host", **case))[0]
    found = ranks(1).run(discrete, Case("nvme", **case))[0]
    assert equal(found, expected)
    everything = ranks(1).run(discrete, Case("nvme"))[0]
    assert 0 < found.stats["link_down_bytes"] < 0.6 * everything.stats["link_down_bytes"]


def test_each_unit_crosses_for_forward_and_for_backward_and_its_gradient_once(ranks: Any) -> None:
    steps = 3
    stats = ranks(1).run(discrete, Case("host", steps=steps))[0].stats
    numel = stats["link_down_bytes"] // (2 * steps)
    assert stats["link_down_bytes"] == 2 * steps * numel
    # the last unit of the forward is the first of the backward, and stays; `gathered` has every unit once more
    assert 2 * numel * steps < stats["link_up_bytes"] <= 2 * numel * (2 * steps + 1)


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_on_the_device_with_states_below(ranks: Any, size: int) -> None:
    """ZeRO-Offload's placement: a unit crosses once a step, after its update, not for every use."""
    placement = {"parameters": "device", "gradients": "host", "optimizer": "nvme"}
    step = {"step": TorchStep("fp32"), "slots": 3}
    expected = ranks(size).run(train, Case("host", store={"step": TorchStep("fp32")}))
    for mine, theirs in zip(ranks(size).run(discrete, Case(placement, store=step)), expected, strict=True):
        assert equal(mine, theirs)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_any_fraction_on_the_device_is_close_to_the_device_store(ranks: Any, size: int, stage: int) -> None:
    expected = ranks(size).run(train, Case(None, stage=stage))[0]
    for shares in ({"device": 1.0}, {"device": 0.5, "host": 0.5}, {"device": 0.3, "host": 0.3, "nvme": 0.4}):
        found = ranks(size).run(discrete, Case(shares, stage=stage, store={"slots": 3}))[0]
        assert found.losses == pytest.approx(expected.losses, abs=2e-2)
        assert found.norms[0] == pytest.approx(expected.norms[0], rel=1e-6)


def test_the_models_own_unit_takes_no_landing_from_the_blocks(small_chunks: None) -> None:
    """Its gradient comes first in a backward and is complete last."""
    with simulated_device():
        model = Model(64, 3)
        store = TieredStore(tile_numel=TILE, streams=streams())
        optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store)
        plan = store.describe()
        names = [plan.units[i].spec.name for i in plan.own_landings]
        assert "root" in names and not [name for name in names if name.startswith("layers")]
        assert plan.landing_numel == max(u.spec.numel for u in plan.units if u.spec.name.startswith("layers"))
        optimizer.close()

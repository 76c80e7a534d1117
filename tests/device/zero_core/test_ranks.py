"""Several devices, a rank each, collectives between them: the reference's numbers, the same bits over residency."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zero_core
from tests.device.zero_core import runs
from tests.device.zero_core.test_parity import TOLERANCE
from zero_core.comm.ranks import mesh_of_replicas


def parity(kind: str, make: Any, micro: int, dtype: torch.dtype, swaps: bool, stage: int) -> tuple[float, float]:
    device = runs.device_of_rank(kind)
    store = runs.swapping(device, late_cycles=200_000) if swaps else None
    return runs.distance(make, device, micro, dtype, stage=stage, store=store)


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("make", [runs.plain, runs.reentrant])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_the_twin(device, device_ranks, stage, dtype, make, swaps):
    for norm, update in device_ranks.run(parity, device.type, make, 2, dtype, swaps, stage):
        assert norm <= TOLERANCE[dtype][0] and update <= TOLERANCE[dtype][1]


def bits(kind: str) -> dict[str, list[int]]:
    """Places where a run has other bits than the first: again, all resident, from a store that copies late."""
    device = runs.device_of_rank(kind)
    first = runs.history(runs.checkpointed, device)
    late = runs.swapping(device, late_cycles=2_000_000)
    return {
        "again": runs.differing(runs.history(runs.checkpointed, device), first),
        "resident": runs.differing(runs.history(runs.checkpointed, device, resident_bytes=1 << 30), first),
        "late": runs.differing(runs.history(runs.checkpointed, device, store=late), first),
    }


def test_the_same_bits(device, device_ranks):
    for found in device_ranks.run(bits, device.type):
        assert found == {"again": [], "resident": [], "late": []}


def on_machines(kind: str, swaps: bool) -> dict[str, Any]:
    """Two machines, each with half of the ranks. A second cut inside them changes no bit; nor does the order of sums,
    where groups of ranks have all shards, by more than it may."""
    device, half = runs.device_of_rank(kind), dist.get_world_size() // 2

    def store() -> Any:
        return runs.swapping(device, late_cycles=2_000_000) if swaps else None

    first = runs.history(runs.checkpointed, device)
    with mock.patch.dict(os.environ, {"GROUP_RANK": str(dist.get_rank() // half)}):
        second = runs.history(runs.checkpointed, device, store=store(), secondary_shards=True)
    mesh = mesh_of_replicas(2)
    return {
        "second cut": runs.differing(second, first),
        "groups": runs.distance(runs.checkpointed, device, 2, torch.float32, store=store(), mesh=mesh),
    }


@pytest.mark.promise("device-ranks")
@pytest.mark.parametrize("swaps", [False, True])
def test_secondary_shards_and_groups_of_ranks(device, four_device_ranks, swaps):
    for found in four_device_ranks.run(on_machines, device.type, swaps):
        assert found["second cut"] == [] and max(found["groups"]) <= max(TOLERANCE[torch.float32])


def owned(kind: str, stage: int, swaps: bool) -> list[torch.Tensor]:
    """Parameters after three steps of Muon, and of AdamW for what is no matrix."""
    rank, device = dist.get_rank(), runs.device_of_rank(kind)
    torch.manual_seed(0)
    model = runs.plain().to(device)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    pair = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)]
    store = runs.swapping(device, late_cycles=200_000) if swaps else None
    optimizer = zero_core.shard(model, pair, stage=stage, store=store, max_grad_norm=0.5)
    assert stage == 0 or any(unit.layout.ranges is not None for unit in zero_core.units(model))
    for step in range(3):
        runs.loss_of(model, runs.batch(step, rank, device, torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zero_core.gathered(model):
        found = [p.detach().cpu() for p in model.parameters()]
    optimizer.close()
    return found


@pytest.mark.promise("muon-owners")
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9 has no Muon")
@pytest.mark.parametrize("swaps", [False, True])
def test_owners_of_matrices_train_as_ranks_that_have_all_states(device, device_ranks, swaps):
    """Gradients differ by the order of sums at most, of which a bf16 Newton-Schulz makes a hundredth of a step."""
    expected = device_ranks.run(owned, device.type, 0, False)[0]
    for ours in device_ranks.run(owned, device.type, 3, swaps):
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=3 * 0.02 * 0.05)

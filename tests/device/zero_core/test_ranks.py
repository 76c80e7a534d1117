"""Several devices, a rank each, collectives between them: the reference's numbers, the same bits over residency."""

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.device.zero_core import runs
from tests.device.zero_core.test_parity import TOLERANCE
from zero_core.comm.ranks import mesh_of_replicas


def parity(kind: str, make: Any, micro: int, dtype: torch.dtype, swaps: bool, stage: int) -> tuple[float, float]:
    device = runs.device_of_rank(kind)
    store = runs.swapping(device, late_cycles=200_000) if swaps else None
    return runs.distance(make, device, micro, dtype, stage=stage, store=store)


@pytest.mark.promise("device-memory-order")
@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("make", [runs.plain, runs.reentrant])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [3, 2, 1, 0])
def test_training_equals_the_twin(device, device_ranks, stage, dtype, make, swaps):
    for norm, update in device_ranks.run(parity, device.type, make, 2, dtype, swaps, stage):
        assert norm <= TOLERANCE[dtype][0] and update <= TOLERANCE[dtype][1]


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

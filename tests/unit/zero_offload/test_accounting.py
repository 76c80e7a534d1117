"""Bytes of tiles: by hand, against `plan_store`, and against what a running store moves.

Fails if a tile, an alignment or a direction is counted once too often.
"""

import itertools

import pytest
import torch

from tests.swap import needs_swap
from tests.unit.zero_offload.sizes import unit
from zero_core import memory
from zero_offload import Hardware, plan_store
from zero_offload.layout.footprint import KINDS, STATE_KINDS
from zero_offload.planning.model_sizes import ModelSizes, ParameterSizes, UnitSizes
from zero_offload.planning.planner import plan
from zero_offload.planning.traffic import TIERS, Shape, shards_of

MI = 1 << 20
HOST = dict.fromkeys(STATE_KINDS, "host")
PLACEMENTS = ("host", "nvme", {"host": 0.37, "nvme": 0.63}, {"device": 0.2, "host": 0.3, "nvme": 0.5})
MIXED = ModelSizes(
    (
        UnitSizes("embedding", (ParameterSizes("embedding.weight", MI + 70),), matmul_numel=0),
        *(
            UnitSizes(f"layers.{i}", (ParameterSizes(f"layers.{i}.w", 2 * MI + 3), ParameterSizes(f"layers.{i}.b", 5)))
            for i in range(4)
        ),
        UnitSizes("frozen", (ParameterSizes("frozen.w", MI // 2),), trained=False),
        UnitSizes("packed", (ParameterSizes("packed.w", MI + 5),), trained=False, own_dtype=torch.uint8),
        UnitSizes("half", (ParameterSizes("half.w", 2 * MI),), trained=False),
        UnitSizes("half:trained", (ParameterSizes("half.b", 100),)),
    )
)


def specs_of(model: ModelSizes, shape: Shape, rank: int = 0):
    return [unit.shard(shape.parameter_dtype, shape.shard_count, rank) for unit in model.units]


@pytest.mark.promise("same-count")
@pytest.mark.parametrize("placements", list(itertools.product(PLACEMENTS, repeat=3)))
def test_what_is_counted_is_what_the_store_reserves(placements):
    by_kind = dict(zip(STATE_KINDS, placements, strict=True))
    for dtype, shards, accumulate in ((torch.bfloat16, 1, 1), (torch.float32, 2, 3)):
        shape = Shape(parameter_dtype=dtype, shard_count=shards, tile_numel=MI, accumulate=accumulate)
        kept = 2 if accumulate == 1 else 4
        truth = plan_store(
            specs_of(MIXED, shape), shape.step, tile_numel=MI, shard_count=shards, gradient_itemsize=kept, **by_kind
        )
        counted = shards_of(MIXED, shape).place(by_kind, None)
        for tier, kind in itertools.product(TIERS, KINDS):
            assert counted.bytes_of(tier, kind) == truth.bytes_of(tier, kind), (tier, kind)
        assert counted.arena_bytes == truth.arena_bytes and counted.extent_bytes("nvme") == truth.extent_bytes("nvme")


@pytest.mark.promise("same-count")
@needs_swap
@pytest.mark.parametrize(
    ("device", "accumulate", "expected"),
    [
        (0.0, 1, 8 + 8 + 2),  # two landing buffers, two units that are open, a gradient that autograd made
        (1.0, 1, 8 + 4),  # a unit's gradient in fp32, and as it arrives
        (0.5, 1, 8 + 8 + 2 + 8),
        (0.5, 2, 8 + 8 + 2 + 8 + 4),  # and beside its sum
    ],
)
def test_a_discrete_device_has_buffers_for_the_gradients_that_stay_and_for_those_that_leave(
    device, accumulate, expected
):
    """Bytes in 16 bits for each element of one of a unit's two parameters."""
    parameters = (ParameterSizes("a", MI), ParameterSizes("b", MI))
    model = ModelSizes(tuple(UnitSizes(f"u{i}", parameters) for i in range(4)))
    machine = Hardware(device="cuda", device_gib=80, host_gib=512)
    shares = dict.fromkeys(STATE_KINDS, {"device": device, "host": 1 - device})
    found = plan(model, machine, **shares, accumulate=accumulate, prefetch_bytes=0)
    assert found.bytes_of("device", "buffers") == expected * MI


@pytest.mark.promise("same-count")
@needs_swap
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_planner_and_the_closed_formulas_agree_where_everything_stays_on_the_device(dtype, accumulate, stage):
    model, ranks = ModelSizes(tuple(unit(f"u{i}", MI) for i in range(4))), 4
    machine = Hardware(device="cuda", device_gib=80, host_gib=512)
    everything = dict.fromkeys(STATE_KINDS, "device")
    options = {"stage": stage, "parameter_dtype": dtype, "shard_count": ranks, "accumulate": accumulate}
    planned = plan(model, machine, **everything, **options)
    assert not planned.needs_store
    found = memory.estimate(4 * MI, ranks, stage, param_dtype=dtype, accumulate=accumulate)
    assert planned.bytes_of("device", "parameters") == found.parameters_bytes
    assert planned.bytes_of("device", "gradients") == found.gradients_bytes
    assert planned.bytes_of("device", "optimizer") == found.optimizer_bytes

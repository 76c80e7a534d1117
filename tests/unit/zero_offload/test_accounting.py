"""Bytes of tiles: by hand, against `plan_store`, and against what a running store moves.

Fails if a tile, an alignment or a direction is counted once too often.
"""

import itertools

import pytest
import torch

from tests.unit.zero_offload.sizes import unit
from zero_core import memory
from zero_offload import Hardware, MemoryByteStore, TieredStore, TorchStep, plan_store
from zero_offload.layout.footprint import KINDS, STATE_KINDS
from zero_offload.planning.model_sizes import ModelSizes, ParameterSizes, UnitSizes
from zero_offload.planning.planner import plan
from zero_offload.planning.traffic import TIERS, Shape, account, shards_of

from . import harness

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


def sizes(*numel: int) -> ModelSizes:
    return ModelSizes.of(list(numel))


def count(model: ModelSizes, shape: Shape, placements=HOST):
    return account(shards_of(model, shape).place(placements, None), shape)


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


NVME, SPLIT = dict.fromkeys(STATE_KINDS, "nvme"), dict.fromkeys(STATE_KINDS, PLACEMENTS[2])


@pytest.mark.parametrize(
    ("where", "dtype", "accumulate"),
    [
        (HOST | {"optimizer": "nvme"}, torch.bfloat16, 1),
        (NVME, torch.bfloat16, 1),
        (NVME, torch.float32, 3),
        (SPLIT, torch.bfloat16, 2),
    ],
)
def test_what_is_counted_is_what_a_step_moves(monkeypatch, where, dtype, accumulate):
    shape = Shape(parameter_dtype=dtype)
    model = ModelSizes(MIXED.units[:2] + MIXED.units[5:])
    specs = specs_of(model, shape)
    monkeypatch.setattr(harness, "make_specs", lambda *_: specs)
    numels, frozen = [spec.numel for spec in specs], [2]
    step = TorchStep()
    step.bind(torch.optim.AdamW([torch.zeros(1)]))
    options = {"step": step, "parameter_dtype": dtype, "reduce_dtype": torch.bfloat16, "accumulate": accumulate}
    options["prefetch_bytes"] = 0  # as the driver says to the store
    planned = plan(model, **where, tile_numel=MI, **options)
    store = TieredStore(nvme=MemoryByteStore(), step=TorchStep(), plan=planned)
    driver = harness.Driver(store, dtype=dtype, numels=numels, frozen=frozen)
    assert store.stats()["setup_write_bytes"] == planned.setup_write_bytes
    for steps in (1, 2):
        driver.step(accumulate)
        store.wait()
        stats = store.stats()
        assert stats["nvme_write_bytes"] == steps * planned.write_bytes_per_step
        # The first update reads the parameters that later ones hand to their forward.
        assert stats["nvme_read_bytes"] <= steps * planned.read_bytes_per_step + planned.setup_write_bytes
    if where["parameters"] == "host":
        assert stats["nvme_read_bytes"] == 2 * planned.read_bytes_per_step
    assert store.stats()["host_bytes"] == planned.total("host") - planned.bytes_of("host", "activations")
    store.close()


@pytest.mark.promise("same-count")
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


@pytest.mark.promise("turn-keeps-units")
def test_copies_stay_for_backward_within_the_bytes_that_may_be_ahead_and_slots_hold_as_many():
    for nbytes, staying in ((4 * MI, 2), (7 * MI, 3), (1, 1), (1 << 40, 8), (0, 0)):
        for shape in (Shape(discrete=True, prefetch_bytes=nbytes), Shape(shard_count=2, prefetch_bytes=nbytes)):
            counted = count(sizes(*[MI] * 8), shape, {**HOST, "parameters": "nvme"})
            assert counted.moved["nvme"]["backward_read"] <= max(1, 8 - staying) * 2 * MI // shape.shard_count

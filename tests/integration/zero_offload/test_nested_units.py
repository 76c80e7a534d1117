"""Units that are in use inside of others, as the tiles of a block's linears: slots, the pool and the plan.

Fails if slots are counted as if each unit were used alone, or the rehearsal closes a unit before those inside of it.
"""

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from zero_core.estimate.pool_simulation import Rehearsal, UnitSize
from zero_core.model.unit_plan import plan_units
from zero_core.unit_memory.unit_memory import CAN_SWAP
from zero_offload import MemoryByteStore, TieredStore, TorchStep, plan

pytestmark = pytest.mark.promise("units-inside-units")

NVME = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")


class Blocks(nn.Module):
    """Blocks of which the two large linears are tiled; the tiles of the first are named before the block's own. There
    are too many blocks for slots of their own, and a parameter of the model is in use around all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64), nn.Linear(64, 150), nn.Linear(150, 64))
            for _ in range(6)
        )
        self.scales = nn.Parameter(torch.full((100, 64), 0.1))
        self.head = nn.Linear(64, 400)
        zero_core.tile_linear(self, 12_000)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return (self.head(x) * self.scales.mean()).square().mean()


def test_a_unit_comes_after_those_that_are_in_use_around_it():
    found = [(unit.name, unit.depth) for unit in plan_units(Blocks())]
    assert found[:5] == [("root", 0), ("layers.0", 0), *((f"layers.0.0.tiles.{i}", 1) for i in range(3))]
    assert [name for name, depth in found if not depth][:4] == ["root", "layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("ahead", [0, 60_000, 1 << 30])
def test_they_have_the_slots_that_were_planned_and_train_as_in_memory(ahead):
    losses = []
    for stored in (False, True):
        torch.manual_seed(0)
        model = Blocks()
        planned = plan(model, **NVME, parameter_dtype=torch.float32, prefetch_bytes=ahead)
        store = TieredStore(plan=planned, nvme=MemoryByteStore(), step=TorchStep()) if stored else None
        optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store, prefetch_bytes=ahead)
        if store is not None:
            assert store.describe().unit_slots == planned.store.unit_slots
            assert store.describe().held == planned.store.held
        losses.append([float(kit.step(optimizer, model(torch.ones(4, 64)))) for _ in range(3)])
        optimizer.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.skipif(not CAN_SWAP, reason="units have memory of their own here, and not the pool's")
@pytest.mark.parametrize("ahead", [0, 60_000, 1 << 30])
@kit.on_ranks(2)
def test_their_pool_is_what_was_rehearsed(ahead):
    torch.manual_seed(0)
    model = Blocks()
    depths = [unit.depth for unit in plan_units(model)]
    optimizer = zero_core.shard(model, kit.sgd(model.parameters()), prefetch_bytes=ahead)
    for _ in range(2):
        kit.step(optimizer, model(torch.ones(4, 64)))
    handle = zero_core.handle(model)
    sizes = [
        UnitSize(unit.layout.numel, 4, encloses=unit.name == "root", depth=depth)
        for unit, depth in zip(handle.units, depths, strict=True)
    ]
    rehearsed = Rehearsal(sizes, 3, shard_count=2, reduce_itemsize=4, lends=1, prefetch_bytes=ahead).pooled_bytes()
    assert handle.engine.pool.peak_nbytes == rehearsed
    optimizer.close()

"""What is not trained, on tiers: the same bits wherever it is kept, and no more than its bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.integration.zero_offload.training import KINDS, tiered
from zero_offload import MemoryByteStore, TieredStore, TorchStep, plan

pytestmark = pytest.mark.promise("frozen-tiers")


class Adapted(nn.Module):
    """A frozen matrix in bf16, codes of 8 bits with a scale, and two adapters that are half as large."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(128, 128).bfloat16(), requires_grad=False)
        self.codes = nn.Parameter(torch.randint(-128, 128, (128, 128), dtype=torch.int8), requires_grad=False)
        self.down, self.up = nn.Linear(128, 64, bias=False), nn.Linear(64, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.base.float() / 11 + x @ self.codes.float() / 800 + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 128).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def trained(placement: Any, prefetch_bytes: int = 0, stage: int = 3) -> tuple[list[float], list[Tensor]]:
    model, optimizer = build()
    store = tiered(placement, tile_numel=1 << 20)
    optimizer = zero_core.shard(model, optimizer, store=store, prefetch_bytes=prefetch_bytes, stage=stage)
    losses = []
    for step in range(3):
        losses.append(float(kit.step(optimizer, model(torch.arange(7)[None] + 7 * step).square().mean())))
    with zero_core.gathered(model):
        bits = [p.detach().clone().reshape(-1).view(torch.uint8) for p in model.parameters()]
    optimizer.close()
    return losses, bits


@pytest.mark.parametrize("prefetch_bytes", [0, 40 << 10, 1 << 30])
@pytest.mark.parametrize("placement", ["nvme", {"host": 0.5, "nvme": 0.5}])
def test_every_placement_has_the_same_bits(placement: Any, prefetch_bytes: int) -> None:
    """A block's three units are in use at once, also where nothing is read ahead: fails if they lack slots."""
    losses, bits = trained(placement, prefetch_bytes)
    expected, of_host = trained("host")
    assert losses == expected and all(torch.equal(a, b) for a, b in zip(bits, of_host, strict=True))
    before = [p.detach().clone().reshape(-1).view(torch.uint8) for p in build()[0].parameters()]
    kept = [not p.requires_grad for p in build()[0].parameters()]
    assert [torch.equal(a, b) for a, b in zip(bits, before, strict=True)] == kept


def test_two_ranks_have_the_same_bits_on_every_tier(ranks) -> None:
    for stage in (2, 3):
        (host, _), (nvme, _) = (ranks(2).run(trained, placement, 0, stage) for placement in ("host", "nvme"))
        assert host[0] == nvme[0] and all(torch.equal(a, b) for a, b in zip(host[1], nvme[1], strict=True))


@pytest.mark.promise("frozen-moves-parameters")
def test_the_plan_is_what_the_store_reserves_and_a_step_writes_nothing_else() -> None:
    model, optimizer = build()
    step = TorchStep()
    step.bind(optimizer)
    kinds = dict.fromkeys(KINDS, "nvme")
    planned = plan(model, **kinds, step=step, tile_numel=1 << 20, prefetch_bytes=0)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert planned.bytes_of("nvme", "parameters") == frozen + 4 * numel
    assert planned.bytes_of("nvme", "optimizer") == 8 * numel and planned.bytes_of("nvme", "gradients") == 4 * numel
    store = TieredStore(plan=planned, nvme=MemoryByteStore(), step=step)
    optimizer = zero_core.shard(model, optimizer, store=store, prefetch_bytes=0)
    reserved = store.describe()
    assert reserved.held == planned.store.held and reserved.arena_bytes == planned.store.arena_bytes
    assert reserved.own_slots == planned.store.own_slots and reserved.unit_slots == planned.store.unit_slots
    for _ in range(2):
        before = store.stats()["nvme_write_bytes"]
        kit.step(optimizer, model(torch.arange(7)[None]).square().mean())
        store.wait()
        assert store.stats()["nvme_write_bytes"] - before == planned.write_bytes_per_step
    optimizer.close()

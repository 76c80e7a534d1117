"""A small model trained through zero_core.shard over a TieredStore, in small chunks; runs on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.unit.zero_offload import simulated
from zero_offload import MemoryByteStore, TieredStore


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, layers: int, vocabulary: int = 50) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, number: int, rank: int | None = None) -> Tensor:
    """Of a rank's own batch of that number."""
    seed = 10 * number + (kit.world()[0] if rank is None else rank)
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(seed))
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Case:
    """One run. `placement` None: zero-core's own DeviceStore."""

    placement: Any = "host"
    overlap: bool = True
    stage: int = 3
    accumulate: int = 1
    steps: int = 3
    width: int = 32  # a block is half a tile, and a little more bytes than a tile has elements
    layers: int = 3
    frozen: tuple[str, ...] = ()
    store: Mapping[str, Any] = field(default_factory=dict)
    shard: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    stats: dict[str, Any]


KINDS = ("parameters", "gradients", "optimizer")


def tiered(*tiers: Any, nvme: Any = None, **options: Any) -> TieredStore:
    """A store with everything on one tier, or each kind on its own, also as a mapping. nvme: by default, in memory."""
    whole = isinstance(tiers[0], Mapping) and bool(set(tiers[0]) & set(KINDS))
    by_kind = tiers[0] if whole else dict(zip(KINDS, (tiers * 3)[:3], strict=True))
    return TieredStore(**by_kind, nvme=nvme or MemoryByteStore(), **options)


def make_store(case: Case) -> TieredStore | None:
    if case.placement is None:
        return None
    options = {"tile_numel": TILE, "streams": simulated.streams(), "overlap": case.overlap, **case.store}
    return tiered(case.placement, **options)


def train(case: Case) -> Outcome:
    with small_chunks():
        return _train(case)


def _train(case: Case) -> Outcome:
    torch.manual_seed(0)
    model = Model(case.width, case.layers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(case.frozen) if case.frozen else True)
    store = make_store(case)
    options = {"stage": case.stage, "param_dtype": torch.bfloat16, "max_grad_norm": 1.0, **case.shard}
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = zero_core.shard(model, torch.optim.AdamW(trainable, lr=1e-2), store=store, **options)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    losses, norms = [], []
    for _ in range(case.steps):
        for _ in range(case.accumulate):
            tokens = torch.randint(0, 50, (2, 12), generator=generator)
            loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            optimizer.scale_loss(loss / case.accumulate).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        norms.append(float(optimizer.grad_norm) if optimizer.grad_norm is not None else 0.0)
    parameters = kit.named_values(model)
    stats = store.stats() if store is not None else {}
    optimizer.close()
    return Outcome(losses, norms, parameters, stats)

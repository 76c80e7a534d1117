"""What the ranks of the checkpoint tests run: the same four micro-batches a step, however many ranks share them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_core
from tests import models
from zero_core import checkpoint

MICRO_BATCHES = 4
CLIP = 0.5


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def make(name: str, stage: int, seed: int, dtype: torch.dtype | None = None, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = models.build(name)
    sharded = zero_core.shard(
        model, adamw(model.parameters()), stage=stage, max_grad_norm=CLIP, param_dtype=dtype, **options
    )
    return model, sharded


def train(model: nn.Module, optimizer: Any, first: int, last: int, clip: bool = False) -> list[float]:
    """The mean loss over all micro-batches of each step in [first, last)."""
    rank, size = world()
    losses = []
    for step in range(first, last):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(rank, MICRO_BATCHES, size):
            loss = models.loss(model, models.batch(step, micro)) * (size / MICRO_BATCHES)
            loss.backward()
            total += loss.detach().double() / size
        if size > 1:
            dist.all_reduce(total)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def save_and_go_on(folder: Path, name: str, stage: int, dtype: torch.dtype | None = None) -> list[float]:
    """Three steps, a checkpoint, three more steps: their losses."""
    model, optimizer = make(name, stage, seed=0, dtype=dtype)
    train(model, optimizer, 0, 3)
    checkpoint.save(folder, model, optimizer, extra={"stage": stage}, tile_numel=500)
    losses = train(model, optimizer, 3, 6)
    optimizer.close()
    return losses


def load_and_go_on(folder: Path, name: str, stage: int, dtype: torch.dtype | None = None, options: Any = None) -> Any:
    """Load into another model that has stepped already; the losses of steps 3 to 6."""
    model, optimizer = make(name, stage, seed=7, dtype=dtype, **(options or {}))
    train(model, optimizer, 0, 1)
    loaded = checkpoint.load(folder, model, optimizer, tile_numel=300)
    losses = train(model, optimizer, 3, 6)
    optimizer.close()
    return loaded, losses

"""What the ranks of the checkpoint tests run: the same four micro-batches a step, however many ranks share them."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_core
from tests import models
from tests.integration.zero_core.mixtures import adamw
from tests.kit import world
from zero_core import checkpoint

MICRO_BATCHES = 4
CLIP = 0.5


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule whose rate changes within the steps that are compared."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def make(name: str, stage: int, seed: int, dtype: Any = None, architecture: Any = None, **options: Any) -> Any:
    model = models.build(name, seed, **(architecture or {}))
    torch.manual_seed(100 * seed + world()[0])  # dropout differs between ranks
    options |= {"stage": stage, "max_grad_norm": CLIP, "param_dtype": dtype}
    return model, zero_core.shard(model, adamw(model.parameters()), **options)


def train(model: nn.Module, optimizer: Any, first: int, last: int, clip: bool = False, scheduler: Any = None) -> Any:
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
        if scheduler is not None:
            scheduler.step()
        losses.append(float(total))
    return losses


def save_and_go_on(folder: Path, name: str, stage: int, *made: Any, **options: Any) -> list[float]:
    """Three steps, a checkpoint, four more steps: their losses. The schedule's state is beside it for who wants it."""
    model, optimizer = make(name, stage, 0, *made, **options)
    scheduler = halving(optimizer)
    train(model, optimizer, 0, 3, scheduler=scheduler)
    checkpoint.save(folder, model, optimizer, scheduler=scheduler, extra={"stage": stage}, tile_numel=500)
    if world()[0] == 0:
        torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    losses = train(model, optimizer, 3, 7, scheduler=scheduler)
    optimizer.close()
    return losses


def load_and_go_on(folder: Path, name: str, stage: int, *made: Any, **options: Any) -> Any:
    """Load into another model that has stepped already; the losses of steps 3 to 7."""
    model, optimizer = make(name, stage, 7, *made, **options)
    scheduler = halving(optimizer)
    train(model, optimizer, 0, 1, scheduler=scheduler)
    loaded = checkpoint.load(folder, model, optimizer, scheduler=scheduler, tile_numel=300)
    losses = train(model, optimizer, 3, 7, scheduler=scheduler)
    optimizer.close()
    return loaded, losses

"""One accelerate script, as a function: for stock accelerate and for ours, on any number of ranks."""

import accelerate
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import zero_hf

from . import trainers
from .trainers import launched, llama

__all__ = ["Script", "accelerator", "launched", "llama", "loaders", "moved", "nvme", "rows", "sgd"]


def accelerator(zero=None, **options):
    """Ours with `zero`, stock without."""
    options = {"cpu": True, **options}
    return accelerate.Accelerator(**options) if zero is None else zero_hf.Accelerator(zero=zero, **options)


def rows(count):
    """(12,) token numbers each, of which each follows from the one before."""
    return [row["input_ids"] for row in trainers.rows(count)]


def loaders(batches, batch_size=2):
    world = dist.get_world_size() if dist.is_initialized() else 1
    return DataLoader(rows(batches * batch_size * world), batch_size=batch_size)


def nvme(tmp_path):
    return {"offload": "nvme", "nvme_paths": [str(tmp_path / "nvme")]}


class Script:
    """What a script makes before its loop, and the loop."""

    def __init__(self, zero=None, *, steps=8, accumulate=2, clip=0.5, lr=5e-3, model=None, **options):
        self.accelerator = accelerator(zero, gradient_accumulation_steps=accumulate, **options)
        model = model or llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
        self.clip, self.norms = clip, []
        prepared = self.accelerator.prepare(optimizer, loaders(steps * accumulate), model, scheduler)
        self.optimizer, self.data, self.model, self.scheduler = prepared

    def train(self, skip=0, stop=None):
        """The mean loss over all ranks of each batch from `skip` to `stop`."""
        losses = []
        data = self.accelerator.skip_first_batches(self.data, skip) if skip else self.data
        for number, batch in enumerate(data, skip):
            if number == stop:
                break
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=batch, labels=batch).loss
                losses.append(self.accelerator.gather(loss.detach().view(1)).mean().item())
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and self.clip:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return losses


def sgd(*models):
    return torch.optim.SGD([{"params": list(model.parameters())} for model in models], lr=0.5)


def moved(acc, optimizers, *layers):
    """A step moves every layer."""
    before = [layer.weight.detach().clone() for layer in layers]
    for layer in layers:
        acc.backward(layer(torch.ones(1, 2)).sum())
    for optimizer in optimizers:
        optimizer.step()
    assert not any(torch.equal(old, layer.weight) for old, layer in zip(before, layers, strict=True))
    acc.free_memory()

"""A user's loop over a durable TieredStore, and what it ends in. Runs on every rank."""

import functools
import random

import numpy as np
import torch
from torch import nn

import zero_core
from tests import kit
from zero_core import checkpoint
from zero_nvme import Slab
from zero_offload import TieredStore
from zero_offload.testing import CrashByteStore

PLACES = {
    "nvme": ("nvme", "nvme", "nvme"),
    "states": ("host", "host", "nvme"),
    "host": ("host", "host", "host"),
    "half": ({"host": 0.5, "nvme": 0.5}, "host", {"host": 0.3, "nvme": 0.7}),
}
STEPS = 6


class Centred(nn.Module):
    """Has a parameter without dimensions, and a buffer and an extra state that forwards in training change. The output
    has all of them."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]

    def forward(self, rows):
        if self.training:
            self.seen += 1
            self.mean.lerp_(rows.detach().float().mean(0), 0.1)
        return self.gain * (rows - self.mean.to(rows.dtype)) / (1 + self.seen)


def made(frozen=False, width=40):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    layers = [nn.Linear(24, width), Centred(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 24)]
    model = nn.Sequential(*layers)
    if frozen:
        layers[0].requires_grad_(False)
    return model


def trained_of(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def slab(folder, name="run"):
    return Slab(folder, name=name, allow_memory=True)


class Training:
    """A user's loop. `position`: the batch that it is at."""

    def __init__(
        self, disk, place="nvme", *, frozen=False, durable=True, width=40, tile_numel=1 << 22, every=1, **options
    ):
        self.model = made(frozen, width)
        self.store = TieredStore(*PLACES[place], nvme=disk, durable=durable, tile_numel=tile_numel)
        optimizer = torch.optim.AdamW(trained_of(self.model), lr=1e-2)
        self.optimizer = zero_core.shard(self.model, optimizer, store=self.store, max_grad_norm=0.1, **options)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.position = 0
        self.resumed = zero_core.resume(
            self.model, self.optimizer, scheduler=self.scheduler, extra=lambda: {"position": self.position}, every=every
        )
        if self.resumed.extra is not None:
            self.position = self.resumed.extra["position"]

    def step(self):
        rows = torch.randn(6, 24, generator=torch.Generator().manual_seed(self.position))
        rows += random.random() + np.random.rand()
        rows = rows.to(next(self.model.parameters()).dtype)
        kit.step(self.optimizer, self.model(rows).float().pow(2).mean())
        self.scheduler.step()
        self.position += 1

    def steps(self, count):
        for _ in range(count):
            self.step()

    def end(self):
        zero_core.commit(self.model)
        self.optimizer.close()

    def to_the_end(self):
        while self.position < STEPS:
            self.step()
        random_number = torch.rand(()) + random.random() + np.random.rand()
        return [*kit.values(self.model, master=True), *_others(self.model), random_number]


def _others(model):
    return [*model.buffers(), torch.tensor(model[1].seen)]


def equal(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@functools.cache
def uninterrupted(**options):
    """What a run with another store ends in, which nothing interrupts."""
    training = Training(CrashByteStore(), **options)
    ends = training.to_the_end()
    training.end()
    return ends


def loaded(folder, frozen=False, width=40, **options):
    """What a model without a store has that reads the checkpoint, and the step that it was saved after."""
    model = made(frozen, width)
    optimizer = zero_core.shard(model, torch.optim.AdamW(trained_of(model), lr=1e-2), **options)
    found = checkpoint.load(folder, model, optimizer)
    kept = optimizer.full_state_dict(rank0_only=False)["state"]
    states = [value for state in kept.values() for value in state.values() if torch.is_tensor(value)]
    values = [*kit.values(model, master=True), *(value.clone() for value in states), *_others(model)]
    optimizer.close()
    return values, found.step

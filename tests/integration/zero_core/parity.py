"""What a rank runs for one parity case: ten steps against the reference, and how far apart they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import zero_core
from tests import models
from zero_core.reference import Reference

STEPS = 10
_DTYPES = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One training run. `optimizer`: "sgd" (with momentum) or "adamw"."""

    model: str
    stage: int
    precision: str
    optimizer: str
    clip: float = 0.5


@dataclass(frozen=True)
class Distance:
    """How far a sharded run ended from the reference; relative losses and norms, parameters by the worst tensor."""

    loss: float
    norm: float
    parameter: float  # distance over the tensor's norm
    update: float  # distance over the norm of the tensor's change
    worst: str


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01)


def world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def run(case: Case, options: dict[str, Any] | None = None) -> Distance | None:
    """Train both; rank 0 returns the distance."""
    rank, size = world()
    dtype = _DTYPES[case.precision]
    model = models.build(case.model)
    dense = models.build(case.model)
    reference = Reference(
        dense, lambda masters: optimizer_of(case.optimizer, masters), param_dtype=dtype, max_grad_norm=case.clip
    )
    first = {name: p.detach().float().clone() for name, p in dense.named_parameters()}
    optimizer = zero_core.shard(
        model,
        optimizer_of(case.optimizer, model.parameters()),
        stage=case.stage,
        param_dtype=dtype,
        max_grad_norm=case.clip,
        reduce_dtype=torch.float32 if dtype is None else None,
        **(options or {}),
    )
    worst_loss = worst_norm = 0.0
    for step in range(STEPS):
        value = models.loss(model, models.batch(step, rank))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = reference.step([models.batch(step, r) for r in range(size)], models.loss)[rank]
        worst_loss = max(worst_loss, abs(float(value.detach()) - expected) / abs(expected))
        worst_norm = max(worst_norm, abs(optimizer.grad_norm - reference.grad_norm) / reference.grad_norm)
    masters = dict(zip([n for n, _ in dense.named_parameters()], reference.masters, strict=True))
    distance = compare(model, masters, first, worst_loss, worst_norm)
    optimizer.close()
    return distance if rank == 0 else None


def compare(model: Any, masters: dict[str, Any], first: dict[str, Any], loss: float, norm: float) -> Distance:
    parameter = update = 0.0
    worst = ""
    with zero_core.gathered(model, master=True):
        for name, ours in model.named_parameters():
            apart = float((ours.detach().double() - masters[name].detach().double()).norm())
            parameter = max(parameter, apart / max(float(masters[name].detach().norm()), 1e-3))
            moved = float((masters[name].detach().float() - first[name]).norm())
            if _is_key_bias(name):
                continue  # softmax does not see it: its gradient is rounding noise
            if moved and apart / moved > update:
                update, worst = apart / moved, name
    return Distance(loss, norm, parameter, update, worst)


def _is_key_bias(name: str) -> bool:
    return name.endswith(("key.bias", "c_attn.bias"))

"""What a rank runs for one parity case: ten steps against the reference, and how far apart they end."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import zero_core
from tests import kit, models
from tests.kit import world
from tests.reference import Reference

STEPS = 10


@dataclass(frozen=True)
class Case:
    """One training run. `optimizer`: "sgd" (with momentum) or "adamw".

    precision: "fp32"; "bf16", reduced in bf16; "bf16/fp32", bf16 parameters whose gradients are reduced in fp32.
    """

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


def run(case: Case) -> Distance | None:
    """Train on every rank; rank 0 then runs the reference on all ranks' batches and returns the distance."""
    rank, size = world()
    dtype = None if case.precision == "fp32" else torch.bfloat16
    model = models.build(case.model)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = zero_core.shard(
        model,
        optimizer_of(case.optimizer, model.parameters()),
        stage=case.stage,
        param_dtype=dtype,
        max_grad_norm=case.clip,
        reduce_dtype=torch.float32 if case.precision != "bf16" else None,
    )
    found = []
    for step in range(STEPS):
        loss = float(kit.step(optimizer, models.loss(model, models.batch(step, rank))))
        found.append((loss, optimizer.grad_norm))
    ours = kit.named_values(model, master=True)
    optimizer.close()
    return compare(case, dtype, size, found, ours, first) if rank == 0 else None


def compare(
    case: Case,
    dtype: torch.dtype | None,
    size: int,
    found: list[tuple[float, float]],
    ours: dict[str, Tensor],
    first: dict[str, Tensor],
) -> Distance:
    dense = models.build(case.model)
    build = partial(optimizer_of, case.optimizer)
    reference = Reference(dense, build, param_dtype=dtype, max_grad_norm=case.clip)
    loss = norm = parameter = update = 0.0
    worst = ""
    for step, (our_loss, our_norm) in enumerate(found):
        expected = reference.step([models.batch(step, r) for r in range(size)], models.loss)[0]
        loss = max(loss, abs(our_loss - expected) / abs(expected))
        norm = max(norm, abs(our_norm - reference.grad_norm) / reference.grad_norm)
    for (name, _), master in zip(dense.named_parameters(), reference.masters, strict=True):
        apart = float((ours[name].double() - master.detach().double()).norm())
        parameter = max(parameter, apart / max(float(master.detach().norm()), 1e-3))
        moved = float((master.detach() - first[name]).norm())
        # softmax does not see a key's bias: its gradient is rounding noise
        if not name.endswith(("key.bias", "c_attn.bias")) and moved and apart / moved > update:
            update, worst = apart / moved, name
    return Distance(loss, norm, parameter, update, worst)

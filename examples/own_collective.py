"""Gathers shards as int8 with a scale for each, by a collective of your own that sends a quarter of the bytes.

torchrun --nproc-per-node 2 examples/own_collective.py

The model computes with approximations, and the masters stay exact. `MessageCollectives` is the implementation for gloo;
everything but the gather is inherited from it. tests/conformance/zero_core/test_toy_collective.py runs the shipped
conformance suite on this class, and trains with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zero_core
from zero_core.comm import MessageCollectives, Work
from zero_core.pool import Pool

SCALE_BYTES = 4  # an fp32 scale follows each shard's int8 values


@dataclass
class Unpacking:
    """Unpacks the shards of all ranks into `whole` when they have arrived."""

    work: Work
    packed: Tensor  # (ranks, n + SCALE_BYTES) uint8, from the pool
    whole: Tensor
    pool: Pool

    def wait(self) -> None:
        self.work.wait()
        for row, values in zip(self.packed, self.whole.view(len(self.packed), -1), strict=True):
            unpack(row, values)
        self.pool.give(self.packed)


def pack(part: Tensor) -> Tensor:
    """Packs (n,) of any float dtype into (n + SCALE_BYTES,) uint8."""
    scale = part.float().abs().max().clamp(min=1e-30) / 127
    values = (part.float() / scale).round().to(torch.int8)
    return torch.cat([values.view(torch.uint8), scale.view(1).view(torch.uint8)])


def unpack(packed: Tensor, out: Tensor) -> Tensor:
    """Inverts `pack`, up to half a step of int8."""
    scale = packed[-SCALE_BYTES:].clone().view(torch.float32)
    return out.copy_(packed[:-SCALE_BYTES].view(torch.int8).float() * scale)


class Int8Gather(MessageCollectives):
    """Gathers approximate parameters for the model. All other collectives are inherited."""

    def all_gather(self, whole: Tensor, part: Tensor, tag: int, *, exact: bool) -> Any:
        if exact:
            return super().all_gather(whole, part, tag, exact=True)
        mine = pack(part)
        packed = self._pool.take(self._size * mine.numel(), torch.uint8)
        work = super().all_gather(packed, mine, tag, exact=True)
        return Unpacking(work, packed.view(self._size, -1), whole, self._pool)

    def arrives_as(self, part: Tensor) -> Tensor:
        return unpack(pack(part), torch.empty_like(part))


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = zero_core.shard(model, optimizer, collectives=Int8Gather)
    torch.manual_seed(dist.get_rank())  # other data on each rank
    for step in range(60):
        inputs = torch.randn(32, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, 59) and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

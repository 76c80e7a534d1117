"""Tiles and segments for tests: what zero-offload would hand to a CpuStep."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero_optim_cpu import CpuStep

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@dataclass
class Tile:
    parameter: Tensor
    gradient: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    start: int
    stop: int
    options: dict[str, Any]
    step: int = 1


def shifted(numel: int, dtype: torch.dtype, shift: int) -> Tensor:
    """Uninitialised, `shift` elements off a 64-byte boundary."""
    raw = torch.empty((numel + shift + 64) * dtype.itemsize, dtype=torch.uint8)
    start = -raw.data_ptr() % 64 + shift * dtype.itemsize
    return raw[start : start + numel * dtype.itemsize].view(dtype)


def make_tile(
    step: CpuStep, master: Tensor, dtype: torch.dtype, gradient_dtype: torch.dtype = FP32, shift: int = 0
) -> Tile:
    """A tile initialised from an fp32 master; its gradient is zero."""
    numel = master.numel()
    tile = Tile(shifted(numel, dtype, shift), shifted(numel, gradient_dtype, shift).zero_())
    for f in step.layout(numel, dtype):
        tile.states[f.name] = shifted(f.numel, f.dtype, shift if f.numel > 1 else 0)
    step.initialise(tile, master)
    return tile


def bits(tensor: Tensor) -> Tensor:
    """The bit pattern, comparable for equality; every NaN counts as one pattern (payloads are not promised)."""
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.contiguous().view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def adamw(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **options)

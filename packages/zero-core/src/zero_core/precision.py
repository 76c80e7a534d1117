"""Rounding a master to the parameter dtype, and the double-precision sum of squares. Single calls, no state.

[Note: ties away]
Every master -> bf16 rounding of this project is to nearest, ties AWAY from zero, so that a 16-bit remainder can rebuild
the master (with ties to even, half of the exact ties cannot be rebuilt). `copy_` rounds ties to even. Setting the
lowest bit of the fp32 pattern first turns every exact tie into "just above the tie" and moves nothing else across one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .store import CHUNK_NUMEL

__all__ = ["round_to", "sum_of_squares"]

_FLOAT32_MAX = torch.finfo(torch.float32).max
_ROUND_NUMEL = 1 << 18  # 1 MiB of fp32 scratch stays in the cache


@torch.no_grad()
def round_to(master: Tensor, out: Tensor) -> None:
    """Write fp32 `master` (n,) into `out` (n,): bf16 ties away, fp16 and others as `copy_` does. NaN stays NaN."""
    if out.dtype != torch.bfloat16:
        out.copy_(master)
        return
    numel = master.numel()
    step = _ROUND_NUMEL if master.device.type == "cpu" else max(numel, 1)
    scratch = torch.empty(min(step, numel), dtype=torch.float32, device=master.device)
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        part = scratch[: stop - start]
        # Without the clamp the set bit would make infinity a NaN; the largest float rounds to infinity all the same.
        torch.clamp(master[start:stop], -_FLOAT32_MAX, _FLOAT32_MAX, out=part)
        part.view(torch.int32).bitwise_or_(1)
        out[start:stop].copy_(part)


@torch.no_grad()
def sum_of_squares(values: Tensor) -> Tensor:
    """() float64: chunks of CHUNK_NUMEL elements, each summed in double, added in order. Not finite if any value is."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    scratch = torch.empty(min(CHUNK_NUMEL, values.numel()), dtype=torch.float64, device=values.device)
    for start in range(0, values.numel(), CHUNK_NUMEL):
        chunk = values[start : start + CHUNK_NUMEL]
        double = scratch[: chunk.numel()]
        double.copy_(chunk)
        total += torch.dot(double, double)
    return total

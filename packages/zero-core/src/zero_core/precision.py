"""Rounds masters to the parameter dtype, and computes sums and means that round once. Keeps no state.

[Note: ties away]
Every master -> bf16 rounding of this project is to nearest, ties AWAY from zero, so that a 16-bit remainder can rebuild
the master (with ties to even, half of the exact ties cannot be rebuilt). `copy_` rounds ties to even. Setting the
lowest bit of the fp32 pattern first turns every exact tie into "just above the tie" and moves nothing else across one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .shard_spec import CHUNK_NUMEL

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What a model is trained in, and what every backend's collectives take."""

_FLOAT32_MAX = torch.finfo(torch.float32).max
_ROUND_NUMEL = 1 << 18  # 1 MiB of fp32 scratch: half a core's second-level cache
_SQUARE_NUMEL = 1 << 16  # of float64 scratch, for the same reason; 0.73 against 1.09 ms per Mi with a whole chunk
_DEVICE_NUMEL = 8 * CHUNK_NUMEL  # of scratch elsewhere: few launches a unit, and no unit's size of fp32 or float64


def as_bytes(values: Tensor) -> Tensor:
    """Returns (nbytes,) uint8 over the memory of a contiguous tensor. Collectives and comparisons lack some dtypes."""
    return values.reshape(-1).view(torch.uint8)


@torch.no_grad()
def round_to(master: Tensor, out: Tensor) -> None:
    """Writes `master` (n,) into `out` (n,): fp32 into bf16 with ties away, all else as `copy_` does. NaN stays NaN."""
    if out.dtype != torch.bfloat16 or master.dtype != torch.float32:
        out.copy_(master)
        return
    step = _ROUND_NUMEL if master.device.type == "cpu" else _DEVICE_NUMEL
    scratch = torch.empty(min(step, master.numel()), dtype=torch.float32, device=master.device)
    for start in range(0, master.numel(), step):
        part = master[start : start + step]
        # Without the clamp the set bit would make infinity a NaN; the largest float rounds to infinity all the same.
        marked = torch.clamp(part, -_FLOAT32_MAX, _FLOAT32_MAX, out=scratch[: part.numel()])
        marked.view(torch.int32).bitwise_or_(1)
        out[start : start + step].copy_(marked)


def rounded(master: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns (n,) `dtype`, as `round_to` writes it; `master` itself where it has that dtype."""
    if master.dtype == dtype:
        return master
    out = torch.empty(master.shape, dtype=dtype, device=master.device)
    round_to(master, out)
    return out


def round_traffic(dtype: torch.dtype) -> int:
    """Returns bytes that `round_to` reads and writes for one fp32 element and its `dtype`, outside of a CPU's caches.

    To bf16: the clamp and the bit read and write fp32 each, and then the copy reads it.
    """
    return (5 if dtype == torch.bfloat16 else 1) * torch.float32.itemsize + dtype.itemsize


def fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether fp32 `values` keep all their bits in `dtype`. Waits for the device."""
    return dtype == torch.float32 or torch.equal(values.to(dtype).float().view(torch.int32), values.view(torch.int32))


@torch.no_grad()
def sum_of_squares(values: Tensor) -> Tensor:
    """Returns () float64: chunks of CHUNK_NUMEL elements, each summed in double, then added. Not finite if any value is
    not.

    On the CPU the chunks are added in order. Elsewhere they are eight times as large, for fewer launches, and are added
    in an order that is the same every time.
    """
    if values.device.type != "cpu":
        return chunk_squares(values, _DEVICE_NUMEL).sum()
    step = _SQUARE_NUMEL
    scratch = torch.empty(min(step, values.numel()), dtype=torch.float64, device=values.device)
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for start in range(0, values.numel(), CHUNK_NUMEL):
        chunk = values[start : start + CHUNK_NUMEL]
        subtotal = torch.zeros_like(total)
        for low in range(0, chunk.numel(), step):
            part = chunk[low : low + step]
            double = scratch[: part.numel()].copy_(part)
            subtotal += torch.dot(double, double)
        total += subtotal
    return total


@torch.no_grad()
def chunk_squares(values: Tensor, chunk_numel: int = CHUNK_NUMEL) -> Tensor:
    """Returns (chunks,) float64: the sum of squares of every `chunk_numel` elements of `values` (n,).

    It is the square of a norm in double: within 2 ULP of the sum itself. CUDA reads each value once, in its own dtype.
    A device that has no kernel for many norms widens a chunk at a time to float64.
    """
    if not values.numel():
        return torch.zeros(0, dtype=torch.float64, device=values.device)
    return torch.stack(torch._foreach_norm(values.split(chunk_numel), 2, dtype=torch.float64)).square_()


@torch.no_grad()
def widen_scaled(values: Tensor, scale: float, out: Tensor) -> Tensor:
    """out (n,) fp32 <- scale * values (n,), multiplied in fp32; returns `out`.

    A CPU takes pieces that stay in its cache. Elsewhere each value is read once and each product written once.
    """
    if values.device.type != "cpu":
        if scale == 1.0:
            return out.copy_(values)
        # One dimension, or the product would be rounded to the dtype of the values.
        return torch.mul(values, torch.full((1,), scale, dtype=torch.float32, device=values.device), out=out)
    for start in range(0, values.numel(), _ROUND_NUMEL):
        part = out[start : start + _ROUND_NUMEL].copy_(values[start : start + _ROUND_NUMEL])
        if scale != 1.0:
            part.mul_(scale)
    return out


@torch.no_grad()
def mean_of_rows(rows: Tensor, out: Tensor) -> None:
    """out (n,) <- the mean of `rows` (m, n) of any float dtype: added in fp32 in the rows' order, rounded once."""
    count, numel = rows.shape
    step = _ROUND_NUMEL if rows.device.type == "cpu" else max(numel, 1)
    scratch = torch.empty(min(step, numel), dtype=torch.float32, device=rows.device)
    for start in range(0, numel, step):
        part = out[start : start + step]
        total = part if out.dtype == torch.float32 else scratch[: part.numel()]
        total.copy_(rows[0, start : start + step])
        for row in rows[1:]:
            total.add_(row[start : start + step])
        total.div_(count)
        if total is not part:
            part.copy_(total)

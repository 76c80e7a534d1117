"""Measures this machine's `Hardware`, in a few seconds and about 1 GiB of host memory (2 GiB beside a GPU).

Owns the measurements only. Not here: those of a discrete device (in probing_device.py). Figures are the rates that this
package would reach: direct I/O through the caller's own `ByteStore` from huge-page memory, the caller's own
`UpdateStep` on tiles out of cache, a transformer block's forward and backward. Each is the best of a few rounds, so
that other processes disturb it least.
"""

from __future__ import annotations

import mmap
import os
import platform
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core import indexed, options_of
from ..protocols import ByteStore, TileView, UpdateSegment, UpdateStep
from .hardware import FORMATS, GB, GIB, Hardware
from .probing_device import best, device_figures, least_seconds
from .traffic import Shape, update_bytes

ROUNDS = 3
BLOCK_BYTES = 8 << 20
BLOCKS = 16  # 128 MiB a direction
UPDATE_NUMEL = 1 << 22
UPDATE_TILES = 4  # 28 bytes an element: 450 MB, beyond the cache of a small machine
SERVER_TILES = 16  # 1.8 GB: beyond that of a GPU's host
SLOW_SECONDS = 2.0
DEVICE_BLOCKS = 8  # of compute, queued before the host waits


def probe(
    *,
    nvme: ByteStore | None = None,
    step: UpdateStep | None = None,
    device: torch.device | str = "cpu",
    parameter_dtype: torch.dtype = torch.bfloat16,
    dtypes: Collection[torch.dtype] = (),
    hidden_size: int = 1024,
    tokens: int = 2048,
    ranks_per_node: int = 1,
    name: str | None = None,
) -> Hardware:
    """Measures the rates and sizes of this rank's machine.

    `nvme`: any ByteStore; if it has an attribute ``paths``, their free space is measured too. `step`: the update to
    time, bound or not; left out, the update's bandwidth stays unknown. It updates parameters of `parameter_dtype`.
    Compute is timed in this dtype and in `dtypes`, as one may be many times as fast as another. Each is float32,
    bfloat16 or float16. The block that is computed has `hidden_size`; figures for other sizes may differ, and smaller
    ones are slower.
    """
    where = indexed(torch.device(device))
    discrete = where.type != "cpu"
    measured = device_figures(where, parameter_dtype) if discrete else {}  # before libraries have workspaces
    figures: dict[str, Any] = {
        "name": name or platform.node() or "this machine",
        "ranks_per_node": ranks_per_node,
        "device": where.type,
        "host_gib": round(host_memory_bytes() / GIB, 2),
        "tflops": {
            name: compute_tflops(where, dtype, hidden_size, tokens)
            for name, dtype in FORMATS.items()
            if dtype in (parameter_dtype, *dtypes)
        },
    }
    figures |= {k: round(v, 2) if k.endswith("_gib") else _figure(v) for k, v in measured.items()}
    if step is not None:
        gbps = update_gbps(step, parameter_dtype, SERVER_TILES if discrete else UPDATE_TILES)
        # Beside a GPU a rank's update has its share of the cores only: the node's figure is that of all ranks.
        figures["update_gbps"] = _figure(gbps * (ranks_per_node if discrete else 1))
    if nvme is not None:
        figures.update(nvme_figures(nvme))
    return Hardware(**figures)


def host_memory_bytes() -> int:
    """Memory of this host, or of the control group that holds this process, if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    try:
        text = limit.read_text().strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total


def nvme_figures(nvme: ByteStore) -> dict[str, float]:
    """GB/s of reads, of overwrites and of both at once; GiB free and the number of paths, if the store has `paths`."""
    pages = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory.random_(0, 255)  # a drive may compress zeros
    buffers = memory.split(BLOCK_BYTES)
    nvme.reserve(2 * BLOCKS * BLOCK_BYTES)
    extents = [nvme.allocate(BLOCK_BYTES) for _ in range(2 * BLOCKS)]
    first, second, half = extents[:BLOCKS], extents[BLOCKS:], BLOCKS // 2

    def gbps(writes: Sequence[Any], reads: Sequence[Any]) -> float:
        def work() -> None:
            tickets = [nvme.write(extent, buffer) for extent, buffer in zip(writes, buffers, strict=False)]
            tickets += [nvme.read(extent, buffer) for extent, buffer in zip(reads, reversed(buffers), strict=False)]
            for ticket in tickets:
                ticket.wait()

        return BLOCKS * BLOCK_BYTES / least_seconds(work, ROUNDS) / GB

    try:
        # Not timed: the first write of an extent also creates that part of the file.
        for ticket in [nvme.write(extent, buffer) for extent, buffer in zip(extents, buffers * 2, strict=True)]:
            ticket.wait()
        rates = {
            "nvme_write_gbps": gbps(first, ()),
            "nvme_read_gbps": gbps((), second),
            "nvme_mixed_gbps": gbps(first[:half], second[half:]),
        }
    finally:
        for extent in extents:
            nvme.free(extent)
    paths = [Path(path) for path in getattr(nvme, "paths", ())]
    if not paths or not all(path.exists() for path in paths):
        return {name: _figure(rate) for name, rate in rates.items()}
    room = round(min(shutil.disk_usage(path).free for path in paths) / GIB, 2)
    # The description is of one path.
    each = {name: _figure(rate / len(paths)) for name, rate in rates.items()}
    return {"nvme_gib": room, "nvme_paths": len(paths), **each}


def update_gbps(step: UpdateStep, parameter_dtype: torch.dtype, count: int) -> float:
    """GB/s of memory traffic (as `traffic.update_bytes` counts it) of AdamW over `count` tiles."""
    optimizer = torch.optim.AdamW([torch.zeros(1)])
    step.bind(optimizer)
    options = options_of(optimizer.param_groups[0])
    segment = UpdateSegment(0, UPDATE_NUMEL, options, step=1)
    tiles = []
    fields = step.layout(UPDATE_NUMEL, parameter_dtype)
    for _ in range(count):
        states = {f.name: torch.zeros(f.numel, dtype=f.dtype) for f in fields}
        parameter, gradient = torch.zeros(UPDATE_NUMEL, dtype=parameter_dtype), torch.full((UPDATE_NUMEL,), 1e-3)
        tiles.append(TileView(states, parameter, gradient))
        step.initialise(tiles[-1], torch.linspace(-1, 1, UPDATE_NUMEL))

    def update() -> None:
        for tile in tiles:
            step.update(tile, [segment], 1.0)

    update()
    shape = Shape(parameter_dtype=parameter_dtype, reduce_dtype=torch.float32)
    return count * update_bytes(shape, UPDATE_NUMEL, fields) / least_seconds(update, ROUNDS) / GB


def compute_tflops(device: torch.device, dtype: torch.dtype, hidden_size: int, tokens: int) -> float:
    """TFLOP/s of forward and backward of a transformer block: 6 FLOP a parameter and token, attention not counted."""
    width, heads = hidden_size, max(1, hidden_size // 64)
    project = nn.Linear(width, 4 * width, bias=False, device=device, dtype=dtype)
    inner, outer = (
        nn.Linear(a, b, bias=False, device=device, dtype=dtype) for a, b in ((width, 3 * width), (3 * width, width))
    )
    discrete = device.type != "cpu"
    sequence = min(2048 if discrete else 256, tokens)
    x = torch.randn(max(1, tokens // sequence), sequence, width, device=device, dtype=dtype, requires_grad=True)
    numel = sum(p.numel() for layer in (project, inner, outer) for p in layer.parameters())

    def block() -> None:
        q, k, v, gate = project(nn.functional.layer_norm(x, (width,))).chunk(4, -1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y = x + attended.transpose(1, 2).flatten(2) * gate.sigmoid()
        (y + outer(nn.functional.silu(inner(y)))).sum().backward()

    def queued() -> None:
        for _ in range(DEVICE_BLOCKS):
            block()
        torch.get_device_module(device).synchronize(device)

    flop = 6 * numel * x.shape[0] * sequence
    if discrete:
        return _figure(DEVICE_BLOCKS * flop / best(queued) / 1e12)
    first = least_seconds(block, 1)
    # A dtype without arithmetic on this processor takes seconds, so that the cost of a first call is negligible.
    return _figure(flop / (first if first > SLOW_SECONDS else least_seconds(block, ROUNDS)) / 1e12)


def _figure(value: float) -> float:
    """Rounds to three significant digits, about the precision of a probe."""
    return float(f"{value:.3g}")

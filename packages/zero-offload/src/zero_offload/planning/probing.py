"""Measures this machine's `Hardware`, in a few seconds and about 1 GiB of host memory (2 GiB beside a GPU).

Owns the measurements only. Figures are the rates that this package would reach: direct I/O through the caller's own
`ByteStore` from huge-page memory, the caller's own `UpdateStep` on tiles out of cache, a transformer block's forward
and backward, and of a discrete device its memory, that memory's speed, and the link to the host both ways. Each is the
best of a few rounds, so that other processes disturb it least. The tests run a simulated device; on a GPU it has run on
one H200.

[Note: Timed copies]
Copies run in the two lanes of `streams`, with host memory like the arena's: huge pages of the exact size where the
device registers it, not torch's pinned allocator, which rounds to powers of two. A round is queued behind the work on
the caller's stream, whose freed memory it may have been given; then the host waits once. A round lasts milliseconds,
the wait microseconds. Rounds are repeated until the clocks of an idle device and of its link have come up; the best
counts.
"""

from __future__ import annotations

import functools
import mmap
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core import indexed
from ..protocols import ByteStore, StartingStep, TileView, UpdateSegment, UpdateStep
from ..streams import Lane, Streams
from .hardware import FORMATS, FRAGMENTS, GB, GIB, Hardware
from .traffic import Shape, update_bytes

ROUNDS = 3
BLOCK_BYTES = 8 << 20
BLOCKS = 16  # 128 MiB a direction
UPDATE_NUMEL = 1 << 22
UPDATE_TILES = 4  # 28 bytes an element: 450 MB, beyond the cache of a small machine
SERVER_TILES = 16  # 1.8 GB: beyond that of a GPU's host
SLOW_SECONDS = 2.0
DEVICE_BLOCKS = 8  # of compute, queued before the host waits
COPY_BYTES = 512 << 20
DEVICE_COPIES = 16  # a round: 16 GiB read and written, as long as the device's memory takes milliseconds for
WARM_SECONDS = 0.3
DEVICE_ROUNDS = 5
LATER_GIB = 0.5  # of kernels that load when they are first called, and of communicators: not there at start-up. A guess
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def device_reserves(device: torch.device, dtype: torch.dtype) -> Mapping[str, float]:
    """GiB of a device's memory that a run cannot use, by cause, for `Hardware.device_reserved_gib`.

    context: memory in use outside of this process's torch allocator, other processes' included. workspaces: memory that
    matrix products in `dtype` keep, in forward and in backward. Both are measured; on a simulated device they are 0.
    The rest is assumed: `LATER_GIB`, and the share `FRAGMENTS` of all memory for fragments, twice that where CUDA's
    allocator has no expandable segments. Waits for the device.
    """
    workspaces = _workspace_bytes(device, dtype)
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    found = {
        "context": max(0, total - free - module.memory_reserved(device)) / GIB,
        "workspaces": workspaces / GIB,
        "libraries later": LATER_GIB,
    }
    if device.type == "cuda" and not expandable_segments():
        return found | {"fragments without expandable_segments": 2 * FRAGMENTS * total / GIB}
    return found | {"fragments": FRAGMENTS * total / GIB}


def expandable_segments() -> bool:
    """Whether the environment turns on expandable segments, which reduce fragments of CUDA's allocator."""
    settings = [os.environ.get(name, "") for name in ALLOCATOR_VARIABLES]
    return any(re.search(r"\bexpandable_segments\s*:\s*true\b", each, re.IGNORECASE) for each in settings)


@functools.cache  # libraries keep their workspaces, so a second call would measure 0
def _workspace_bytes(device: torch.device, dtype: torch.dtype) -> int:
    """Bytes that stay allocated after a product, and after its backward, for whose thread the library has its own."""
    module = torch.get_device_module(device)
    before = module.memory_allocated(device)
    with torch.enable_grad():
        values = torch.ones(256, 256, dtype=dtype, device=device, requires_grad=True)
        torch.autograd.grad((values @ values).sum(), values)
    module.synchronize(device)
    del values
    return max(0, module.memory_allocated(device) - before)


def device_figures(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
    """`device_gib`, `device_reserved_gib`, `device_gbps` and the three of the link, of one device."""
    total = torch.get_device_module(device).mem_get_info(device)[1]
    reserved = sum(device_reserves(device, dtype).values())
    figures = {"device_gib": total / GIB, "device_reserved_gib": reserved}
    streams = Streams(device, torch.empty(0, dtype=torch.uint8, device="cpu"))
    try:
        return figures | rates(device, streams)
    finally:
        streams.close()


def rates(device: torch.device, streams: Streams) -> dict[str, float]:
    """GB/s of the device's memory, and of the link: to the device, from it, and both at once."""
    host = streams.host(2 * COPY_BYTES)
    host.fill_(1)  # the pages must be there, and not be the one page of zeros
    out, back = host.split(COPY_BYTES)
    first, second = (streams.empty(COPY_BYTES, torch.uint8) for _ in range(2))
    allocated = streams.mark()

    def copied(*copies: tuple[Lane, Tensor, Tensor]) -> Callable[[], None]:
        def work() -> None:
            for mark in [streams.copy(lane, into, source, (allocated,)) for lane, into, source in copies]:
                mark.wait()

        return work

    def inside() -> None:
        for _ in range(DEVICE_COPIES):
            second.copy_(first)
        torch.get_device_module(device).synchronize(device)

    up: tuple[Lane, Tensor, Tensor] = ("swap_in", first, out)
    down: tuple[Lane, Tensor, Tensor] = ("swap_out", back, second)
    figures = {
        "link_gbps": COPY_BYTES / best(copied(up)) / GB,
        "link_out_gbps": COPY_BYTES / best(copied(down)) / GB,
        "link_mixed_gbps": 2 * COPY_BYTES / best(copied(up, down)) / GB,
    }
    streams.give_back(host)
    return figures | {"device_gbps": 2 * DEVICE_COPIES * COPY_BYTES / best(inside) / GB}


def best(work: Callable[[], None]) -> float:
    """Least seconds of a few rounds, after warm-up rounds that bring the clocks up."""
    begin = time.perf_counter()
    while True:
        work()
        if time.perf_counter() - begin >= WARM_SECONDS:
            break
    return least_seconds(work, DEVICE_ROUNDS)


def least_seconds(work: Callable[[], None], rounds: int) -> float:
    """Least seconds of `rounds` rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)


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
        update, nbytes = updates(step, parameter_dtype, SERVER_TILES if discrete else UPDATE_TILES)
        update()
        gbps = nbytes / least_seconds(update, ROUNDS) / GB
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


def updates(step: UpdateStep, parameter_dtype: torch.dtype, count: int) -> tuple[Callable[[], None], int]:
    """A round of AdamW over `count` tiles, and its bytes of memory traffic as `traffic.update_bytes` counts them."""
    optimizer = torch.optim.AdamW([torch.zeros(1, device="cpu")])
    step.bind(optimizer)
    begin = step.start if isinstance(step, StartingStep) and step.in_a_row else step.update  # as a run does it
    segment = UpdateSegment(0, UPDATE_NUMEL, optimizer.defaults, step=1)
    tiles = []
    fields = step.layout(UPDATE_NUMEL, parameter_dtype)
    for _ in range(count):
        states = {f.name: torch.zeros(f.numel, dtype=f.dtype, device="cpu") for f in fields}
        parameter = torch.zeros(UPDATE_NUMEL, dtype=parameter_dtype, device="cpu")
        tiles.append(TileView(states, parameter, torch.full_like(parameter, 1e-3, dtype=torch.float32)))
        step.initialise(tiles[-1], torch.linspace(-1, 1, UPDATE_NUMEL, device="cpu").float())

    def update() -> None:
        for handle in [begin(tile, [segment], 1.0) for tile in tiles]:
            if handle is not None:
                handle.wait()

    shape = Shape(parameter_dtype=parameter_dtype, reduce_dtype=torch.float32)
    return update, count * update_bytes(shape, UPDATE_NUMEL, fields)


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

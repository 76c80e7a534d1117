"""Measures a discrete device for `probe`: its memory, that memory's speed, and the link to the host both ways.

Owns these measurements only. The tests run it on a simulated device; on a GPU it has run on one H200.

[Note: Timed copies]
Copies run in the two lanes of `streams`, with host memory like the arena's: huge pages of the exact size where the
device registers it, not torch's pinned allocator, which rounds to powers of two. A round is queued behind the work on
the caller's stream, whose freed memory it may have been given; then the host waits once. A round lasts milliseconds,
the wait microseconds. Rounds are repeated until the clocks of an idle device and of its link have come up; the best
counts.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..streams import DeviceStreams, Lane, Streams
from .hardware import FRAGMENTS, GB, GIB

COPY_BYTES = 512 << 20
DEVICE_COPIES = 16  # a round: 16 GiB read and written, as long as the device's memory takes milliseconds for
WARM_SECONDS = 0.3
ROUNDS = 5
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
    streams = DeviceStreams(device, torch.empty(0, dtype=torch.uint8))
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
    return least_seconds(work, ROUNDS)


def least_seconds(work: Callable[[], None], rounds: int) -> float:
    """Least seconds of `rounds` rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)

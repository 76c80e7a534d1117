"""What `probe` asks of a device apart: its memory, how fast that is, and the link to the host in each direction.

Owns these measurements only. NOT YET RUN ON A GPU: the tests run it on a simulated device.

[Note: What is timed]
Copies of registered memory, as the arena is: an anonymous mapping with huge pages, exactly sized, touched before it is
registered (so it is beside the caller's cores), not torch's pinned allocator, which rounds to powers of two. Everything
is queued, then the host waits once; a round lasts milliseconds, the wait microseconds. Rounds are repeated until the
clocks of an idle device and of its link have come up, and the best counts.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .device import register, unregister
from .hardware import GB, GIB

COPY_BYTES = 512 << 20
DEVICE_COPIES = 16  # a round: 16 GiB read and written, as long as the device's memory takes milliseconds for
WARM_SECONDS = 0.3
ROUNDS = 5


def device_figures(device: torch.device) -> dict[str, float]:
    """`device_gib`, `device_reserved_gib`, `device_gbps` and the three of the link, of one device."""
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    figures = {"device_gib": total / GIB, "device_reserved_gib": max(1.0, (total - free) / GIB)}
    first, second = (torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    lanes = [module.Stream(device) for _ in range(2)]

    def copied(*pairs: tuple[Tensor, Tensor]) -> Callable[[], None]:
        def work() -> None:
            for lane, (into, source) in zip(lanes, pairs, strict=False):
                with module.stream(lane):
                    into.copy_(source, non_blocking=True)
            module.synchronize(device)

        return work

    def inside() -> None:
        for _ in range(DEVICE_COPIES):
            second.copy_(first)
        module.synchronize(device)

    with registered(2 * COPY_BYTES, device) as host:
        out, back = host[:COPY_BYTES], host[COPY_BYTES:]
        figures["link_gbps"] = COPY_BYTES / best(copied((first, out))) / GB
        figures["link_out_gbps"] = COPY_BYTES / best(copied((back, second))) / GB
        figures["link_mixed_gbps"] = 2 * COPY_BYTES / best(copied((first, out), (back, second))) / GB
    figures["device_gbps"] = 2 * DEVICE_COPIES * COPY_BYTES / best(inside) / GB
    return figures


def best(work: Callable[[], None]) -> float:
    """Least seconds of a few rounds, after as many as bring the clocks up."""
    begin = time.perf_counter()
    while True:
        work()
        if time.perf_counter() - begin >= WARM_SECONDS:
            break
    return least_seconds(work, ROUNDS)


def least_seconds(work: Callable[[], None], rounds: int) -> float:
    """Of a few rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)


@contextmanager
def registered(nbytes: int, device: torch.device) -> Iterator[Tensor]:
    """(nbytes,) uint8 of host memory that the device copies from and to by itself."""
    pages = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    memory.fill_(1)  # the pages must be there, and not be the one page of zeros
    register(memory, device)
    try:
        yield memory
    finally:
        torch.get_device_module(device).synchronize(device)
        unregister(memory, device)

"""What `probe` asks of a device apart: its memory, how fast that is, and the link to the host in each direction.

Owns these measurements only. NOT YET RUN ON A GPU: the tests run it on a simulated device.

[Note: What is timed]
Copies in the two lanes of `streams`, of host memory as the arena is: with huge pages and exactly sized where the device
registers it, not torch's pinned allocator, which rounds to powers of two. A round is queued behind what the caller's
stream holds, whose freed memory it may have been given; then the host waits once. A round lasts milliseconds, the wait
microseconds. Rounds are repeated until the clocks of an idle device and of its link have come up; the best counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..streams import DeviceStreams, Lane, Streams
from .hardware import GB, GIB

COPY_BYTES = 512 << 20
DEVICE_COPIES = 16  # a round: 16 GiB read and written, as long as the device's memory takes milliseconds for
WARM_SECONDS = 0.3
ROUNDS = 5


def device_figures(device: torch.device) -> dict[str, float]:
    """`device_gib`, `device_reserved_gib`, `device_gbps` and the three of the link, of one device."""
    free, total = torch.get_device_module(device).mem_get_info(device)
    figures = {"device_gib": total / GIB, "device_reserved_gib": max(1.0, (total - free) / GIB)}
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

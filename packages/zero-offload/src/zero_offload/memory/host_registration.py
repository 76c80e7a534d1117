"""Registers host memory with a device, so that the device copies from and to it by itself. Only vendors provide this.

CUDA's and ROCm's runtime registers memory that is there already (`cudart().cudaHostRegister`, under this name on both).
A device whose module offers the same call is used in the same way. For any other device torch allocates pinned memory
(`Arena(pinned=True)`), which its allocator rounds up, perhaps to a power of two, and which has no huge pages.

[Note: blocks]
The runtime brings every page into memory in one thread, which takes a tenth of a second for each GB, and drivers refuse
a call of hundreds of GB. So memory is registered in blocks, and several threads bring each block's pages in before the
call. A copy has to stay inside of one block: `parts` cuts one that does not.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import LESS, OffloadError, gib

BLOCK_BYTES = 16 << 30  # drivers accept 64 GiB; progress is logged once a block
TELL_SECONDS = 5.0  # registering takes longer than this before progress is logged
_PART_BYTES = 256 << 20  # of a block, that one thread brings into memory
_MADV_POPULATE_WRITE = 23
_LOG = logging.getLogger("zero_offload")


def registers(device: torch.device) -> bool:
    """Whether `register` works for the device. If not, torch has to pin the host memory of its copies."""
    return hasattr(torch.get_device_module(device), "cudart")


def register(host: Tensor, device: torch.device) -> None:
    """Lets the device copy from and to `host` (uint8, whole pages) by itself. All its pages are in memory from here on.

    Keeps its values. Raises OffloadError, which names the limits; then nothing is registered.
    """
    done, begun = 0, time.monotonic()
    for block in host.split(BLOCK_BYTES):
        status = _bring_in(block)
        what = "madvise" if status else "cudaHostRegister"
        status = status or _call(device, "cudaHostRegister", block, block.nbytes, 0)
        if status:
            with suppress(OffloadError):
                unregister(host[:done], device)
            raise OffloadError(_refused(f"{what} of {gib(block.nbytes)}", status, done, host.nbytes, device))
        done += block.nbytes
        if time.monotonic() - begun > TELL_SECONDS:
            _LOG.warning("registered %s of %s of host memory with %s", gib(done), gib(host.nbytes), device)


def unregister(host: Tensor, device: torch.device) -> None:
    """The inverse of `register`. No copy may be under way."""
    found = [_call(device, "cudaHostUnregister", block) for block in host.split(BLOCK_BYTES) if block.nbytes]
    if status := next((status for status in found if status), 0):
        raise OffloadError(f"cudaHostUnregister returned {status} on {device}; end the process to free its host memory")


def parts(memory: Tensor, registered: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of elements of contiguous `memory`, each inside of one block of the tensor `registered`."""
    size = memory.element_size()
    first = memory.data_ptr() - registered.data_ptr()
    start = 0
    while start < memory.numel():
        room = BLOCK_BYTES - (first + start * size) % BLOCK_BYTES
        stop = min(memory.numel(), start + room // size)
        yield start, stop
        start = stop


def event(device: torch.device) -> Any:
    """An event of the device. The host sleeps while it waits for it, if the device has such events."""
    module = torch.get_device_module(device)
    try:
        return module.Event(blocking=True)
    except TypeError:  # XPU's have no such option
        return module.Event()


def _call(device: torch.device, name: str, host: Tensor, *options: int) -> int:
    """Calls the runtime. Returns its status, 0 for success."""
    module = torch.get_device_module(device)
    with module.device(device):
        status = int(getattr(module.cudart(), name)(host.data_ptr(), *options))
    if status:
        with suppress(RuntimeError):  # torch leaves the error for the next kernel to report
            torch.zeros(1, device=device)
    return status


def _refused(what: str, status: int, done: int, nbytes: int, device: torch.device) -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else gib(soft)
    return (
        f"{what} failed on {device} with status {status}, after {gib(done)} of {gib(nbytes)}. The store needs "
        f"all {gib(nbytes)} as free host memory, within the limit of locked memory (ulimit -l: {limit}; a driver may "
        f"allow less): {LESS}. Or raise the limit (in a container, the container's)"
    )


# -- bringing pages in -------------------------------------------------------------------------------------------------


def _bring_in(block: Tensor) -> int:
    """Brings the block's pages into memory, near the CPU that this thread is on. Returns 0, or an errno."""
    cpus = _near()
    with ThreadPoolExecutor(min(16, len(cpus)), "zero-offload touch", os.sched_setaffinity, (0, cpus)) as pool:
        return max(pool.map(_touch, block.split(_PART_BYTES)))


def _near() -> set[int]:
    """The CPUs on this thread's NUMA node that it may use: a page goes to the node of the CPU that first touches it."""
    allowed = os.sched_getaffinity(0)
    cpu = ctypes.CDLL(None).sched_getcpu()
    for node in Path(f"/sys/devices/system/cpu/cpu{cpu}").glob("node*/cpulist"):
        spans = (span.split("-") for span in node.read_text().strip().split(","))
        return allowed & {each for span in spans for each in range(int(span[0]), int(span[-1]) + 1)} or allowed
    return allowed


def _touch(part: Tensor) -> int:
    """Brings pages into memory by writing a page's own value to it. Returns 0, or an errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(part.nbytes), _MADV_POPULATE_WRITE) == 0:
        return 0
    if (failed := ctypes.get_errno()) != errno.EINVAL:
        return failed
    part[:: os.sysconf("SC_PAGE_SIZE")].bitwise_or_(0)  # before Linux 5.14, or not from a page's boundary
    return 0

"""Tells the detector what it cannot see: native code that touches memory, and edges between host threads.

Only pinned and registered host memory is followed, because only that can be in use by a stream's copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from .build import native

Memory: TypeAlias = "torch.Tensor | tuple[int, int]"  # a tensor, or (address, number of bytes)
Extent = tuple[int, int, bool]  # first byte, past the last, written


def runs(memory: Memory) -> list[tuple[int, int]]:
    """Returns the contiguous ranges of addresses [begin, end) that the memory consists of."""
    if not isinstance(memory, torch.Tensor):
        address, nbytes = memory
        return [(address, address + nbytes)] if nbytes else []
    if memory.numel() == 0:
        return []
    item, address = memory.element_size(), memory.data_ptr()
    dims = sorted((stride, size) for stride, size in zip(memory.stride(), memory.shape, strict=True) if size > 1)
    length, starts = 1, [0]  # elements of one run, and where the runs begin
    for stride, size in dims:
        if stride <= length:  # goes on where the run ends, or overlaps it
            length = max(length, stride * (size - 1) + length)
        else:
            starts = [start + i * stride for start in starts for i in range(size)]
    return [(address + start * item, address + (start + length) * item) for start in starts]


def extents(reads: Sequence[Memory], writes: Sequence[Memory]) -> list[Extent]:
    """Returns what the runtime is told of an access."""
    return [(*run, write) for some, write in ((reads, False), (writes, True)) for one in some for run in runs(one)]


def host_access(what: str, reads: Sequence[Memory] = (), writes: Sequence[Memory] = ()) -> None:
    """Says that this thread's native code touches the memory now: after the call's start, and before its return."""
    native.host_access(what, extents(reads, writes))


class Task:
    """Native work that touches memory beside the thread that began it, an asynchronous read for example."""

    def __init__(self, what: str, reads: Sequence[Memory] = (), writes: Sequence[Memory] = ()) -> None:
        self._native = native.begin_task(what, extents(reads, writes))

    def finish(self) -> None:
        """Says that the calling thread has learnt that the work has ended. Each thread that learns it may call this."""
        self._native.finish()


def begin(what: str, reads: Sequence[Memory] = (), writes: Sequence[Memory] = ()) -> Task:
    """Says that native work begins, which touches the memory until it has ended."""
    return Task(what, reads, writes)


class Meeting:
    """An edge between host threads that Python's own tools do not show: a flag in shared memory, a native queue."""

    def __init__(self) -> None:
        self._native = native.Meeting()

    def leave(self) -> None:
        """Makes known what this thread has done so far. Call it before the other thread can go on."""
        self._native.leave()

    def hear(self) -> None:
        """Orders this thread after everything that was left here before."""
        self._native.hear()

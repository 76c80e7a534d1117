"""Tells the detector about native code that touches memory, and about edges between host threads: it sees neither.

Only pinned and registered host memory is followed, because only that can be in use by a stream's copy. Also follows the
calls that hand a tensor's values to Python without an operator of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from .build import native

Memory: TypeAlias = "torch.Tensor | tuple[int, int]"  # a tensor, or (address, number of bytes)
Extent = tuple[int, int, bool]  # first byte, past the last, written


def extents(reads: Sequence[Memory], writes: Sequence[Memory]) -> list[Extent]:
    """Returns the contiguous ranges of addresses of an access."""
    found: list[Extent] = []
    for some, write in ((reads, False), (writes, True)):
        for memory in some:
            if isinstance(memory, torch.Tensor):
                found += native.extents(memory, write)
            else:
                address, nbytes = memory
                found.append((address, address + nbytes, write))
    return found


def host_access(what: str, reads: Sequence[Memory] = (), writes: Sequence[Memory] = ()) -> None:
    """Tells the detector that this thread's native code touches the memory now, between the call and its return."""
    native.host_access(what, extents(reads, writes))


def follow_reads() -> None:
    """Makes tolist, numpy (so `numpy.asarray`), DLPack and pickling (so `torch.save`) reads by the host."""
    for name in ("tolist", "numpy", "__dlpack__", "__reduce_ex__"):
        _follow_read(name, getattr(torch.Tensor, name))


def _follow_read(name: str, read: Any) -> None:
    @functools.wraps(read)
    def followed(self: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        native.host_reads(f"Tensor.{name}", self)
        return read(self, *args, **keywords)

    setattr(torch.Tensor, name, followed)


class Task:
    """Native work that touches memory beside the thread that began it, an asynchronous read for example."""

    def __init__(self, what: str, reads: Sequence[Memory] = (), writes: Sequence[Memory] = ()) -> None:
        self._native = native.begin_task(what, extents(reads, writes))

    def finish(self) -> None:
        """Tells the detector that the calling thread knows that the work has ended. Each such thread may call it."""
        self._native.finish()


def begin(what: str, reads: Sequence[Memory] = (), writes: Sequence[Memory] = ()) -> Task:
    """Tells the detector that native work begins, which touches the memory until it has ended."""
    return Task(what, reads, writes)


class Meeting:
    """An edge between host threads that Python's own tools do not show: a flag in shared memory, a native queue."""

    def __init__(self) -> None:
        self._native = native.Meeting()

    def leave(self) -> None:
        """Publishes this thread's past. Call it before the other thread can go on."""
        self._native.leave()

    def hear(self) -> None:
        """Orders this thread after the past of all threads that called `leave` before."""
        self._native.hear()

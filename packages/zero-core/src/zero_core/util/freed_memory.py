"""Gives memory back: tensors' bytes to a store of bytes for a while, and blocks of glibc's heap to the kernel.

Owns the extent of the bytes and their transfers, a few at a time. The caller owns the tensors, and decides about their
memory meanwhile. The process decides about its heap: only sleeping and moving shards trim it here.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from ..layout import round_up

PART_BYTES = 16 << 20
PARTS = 4  # under way at a time; from a device each has a buffer of pinned memory
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_PIECES = 64  # about three returns in a step of 10 units and 8 parts
_MOST = 1 << 30  # mallopt takes an int; beyond HEAP_MAX/2 on 64 bit the mmap threshold is refused, so it is tried first


class Keeper(Protocol):
    """The methods of `zero_offload.ByteStore` that are needed here. `zero_nvme.Slab` has them, for example."""

    alignment: int

    def allocate(self, nbytes: int) -> Any: ...

    def free(self, extent: Any) -> None: ...

    def read(self, extent: Any, buffer: Any, offset: int = 0) -> Any:
        """Begins to fill `buffer`. Returns an object with a `wait()`, which raises the error of a read that failed."""

    def write(self, extent: Any, buffer: Any, offset: int = 0) -> Any: ...


class HostMemory:
    """A `Keeper` in host memory, for tensors on a discrete device."""

    alignment = 64

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def free(self, extent: Tensor) -> None:
        extent.untyped_storage().resize_(0)

    def read(self, extent: Tensor, buffer: Tensor, offset: int = 0) -> HostMemory:
        buffer.copy_(extent[offset : offset + buffer.numel()])
        return self

    def write(self, extent: Tensor, buffer: Tensor, offset: int = 0) -> HostMemory:
        extent[offset : offset + buffer.numel()].copy_(buffer)
        return self

    def wait(self) -> None:
        """No-op: the copy is done."""


class SavedBytes:
    """Tensors' bytes in one extent of a `Keeper`. One thread at a time."""

    def __init__(self) -> None:
        self._keeper: Keeper | None = None
        self._extent: Any = None
        self.nbytes = 0

    def put(self, keeper: Keeper, tensors: Sequence[Tensor]) -> None:
        """Writes contiguous tensors, on any device. Raises the keeper's errors, and keeps nothing then."""
        sizes = [round_up(tensor.nbytes, keeper.alignment) for tensor in tensors]
        if not sum(sizes):
            return
        extent = keeper.allocate(sum(sizes))
        try:
            with torch.no_grad():
                _move(keeper, extent, tensors, write=True)
        except BaseException:
            keeper.free(extent)
            raise
        self._keeper, self._extent, self.nbytes = keeper, extent, sum(sizes)

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Reads the bytes into tensors like those of `put`, in the same order. The bytes are kept until `free`."""
        if self._keeper is not None:
            with torch.no_grad():
                _move(self._keeper, self._extent, tensors, write=False)

    def free(self) -> None:
        """Frees the bytes. Idempotent."""
        keeper, extent, self._keeper, self._extent, self.nbytes = self._keeper, self._extent, None, None, 0
        if keeper is not None:
            with suppress(Exception):  # its owner may have closed it already
                keeper.free(extent)


def give_memory(tensors: Iterable[Tensor]) -> None:
    """Frees the memory under tensors that are whole storages; they and all views of them stay."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def take_memory(tensors: Iterable[Tensor]) -> None:
    """Gives them memory again, with undefined contents."""
    for tensor in tensors:
        if not tensor.untyped_storage().nbytes():
            tensor.untyped_storage().resize_(tensor.nbytes)


def _parts(tensors: Sequence[Tensor], alignment: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (offset in the extent, uint8) of each part."""
    first = 0
    for tensor in tensors:
        data = tensor.detach().view(-1).view(torch.uint8)
        for start in range(0, data.numel(), PART_BYTES):
            yield first + start, data[start : start + PART_BYTES]
        first += round_up(tensor.nbytes, alignment)


def _move(keeper: Keeper, extent: Any, tensors: Sequence[Tensor], *, write: bool) -> None:
    """Returns when everything is written, or read. When it raises, nothing is under way any more.

    A part on a discrete device passes through a pinned buffer. The host waits for its copy, while the keeper moves
    other parts.
    """
    moving: deque[tuple[Any, Tensor, Tensor]] = deque()  # the keeper's ticket, the part, and the buffer that it moves
    spare: list[Tensor] = []  # pinned buffers that nothing uses

    def end_one() -> None:
        ticket, part, buffer = moving[0]
        ticket.wait()
        moving.popleft()
        if buffer is not part:
            if not write:
                part.copy_(buffer[: part.numel()])
            spare.append(buffer)

    try:
        for offset, part in _parts(tensors, keeper.alignment):
            if len(moving) == PARTS:
                end_one()
            buffer = part
            if part.device.type != "cpu":
                if not spare:
                    spare.append(torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu"))
                buffer = spare.pop()
                if write:
                    buffer[: part.numel()].copy_(part)
            begin = keeper.write if write else keeper.read
            moving.append((begin(extent, buffer[: part.numel()], offset), part, buffer))
        while moving:
            end_one()
    finally:
        for ticket, _, _ in moving:
            with suppress(Exception):
                ticket.wait()


# -- glibc's heap -------------------------------------------------------------------------------------------------


def keep_freed_memory() -> bool:
    """Asks glibc to keep freed blocks instead of returning them to the kernel; False where there is no glibc.

    Training frees and allocates the same activations every step. Returned to the kernel, each costs page faults at its
    next use: 70-80 thousand a step for a 120 M model on the CPU. The price is that memory once used stays with the
    process. Call it first, before tensors are made. `THP_MEM_ALLOC_ENABLE=1` in the environment, which torch reads at
    its first tensor, takes more of the page faults away, and less memory: docs/results/parts.md, "Huge pages".
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    kept = any(mallopt(_M_MMAP_THRESHOLD, size) for size in (_MOST, 32 << 20))
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


def give_back_freed_memory() -> None:
    """Returns freed blocks to the kernel once, where there is a glibc. Blocks of 32 MiB and less stay otherwise."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class FreedMemory:
    """Returns freed blocks to the kernel between pieces of work, when the memory gained is worth the page faults.

    Blocks that stay with the process save the next piece its page faults, until they are holes too small for any
    request. So they are returned once the process has grown by twice the growth in the first piece after the last
    return. That piece may not be typical, so they are also returned, and the growth measured again, after `_PIECES`
    pieces.
    """

    def __init__(self) -> None:
        # Bytes resident after the last return, bytes above which to return again, pieces begun. None: not known yet.
        self._state: tuple[int | None, int | None, int] = (None, None, 0)

    def begin(self) -> None:
        """Marks the beginning of a piece of work. Call it in any thread."""
        found, (least, most, begun) = _resident_bytes(), self._state
        if least is not None and most is None:
            most = least + 2 * max(found - least, 1 << 20)
        elif most is None or found > most or begun >= _PIECES:
            give_back_freed_memory()
            least, most, begun = _resident_bytes(), None, 0
        self._state = least, most, begun + 1


def _resident_bytes() -> int:
    """Returns the process's resident bytes, 0 where there is no /proc."""
    with suppress(OSError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0

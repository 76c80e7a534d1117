"""Keeps bytes in memory, as the slow reference ByteStore. Serves requests at once or on one thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import BudgetError, ClosedError, gib
from .protocols import Ticket


@dataclass(frozen=True, eq=False)
class MemoryExtent:
    offset_bytes: int
    nbytes: int


class Served:
    """The ticket of a request whose parts a store's threads serve. Without parts it is done."""

    def __init__(self, parts: Sequence[Future[Any]] = ()) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self, timeout: float | None = None) -> None:
        if wait(self._parts, timeout).not_done:
            raise TimeoutError(f"the request is not done after {timeout} seconds")
        for part in self._parts:  # after all of them: none may touch the buffer once this raises
            part.result()


def bytes_of(buffer: Any) -> Tensor:
    """(nbytes,) uint8 over the memory of a contiguous CPU tensor or a writable buffer."""
    if not isinstance(buffer, Tensor):
        return torch.frombuffer(buffer, dtype=torch.uint8)
    if buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ValueError(f"buffer of shape {tuple(buffer.shape)} on {buffer.device} is not a contiguous CPU tensor")
    return buffer.detach().reshape(-1).view(torch.uint8)


class MemoryByteStore:
    """Bytes in plain tensors. `asynchronous`: one thread serves requests in order, so that tickets can be pending.

    `capacity_bytes`: beyond it `reserve` and `allocate` raise BudgetError; None: no limit.

    Examples:
        >>> import torch, zero_offload
        >>> store = zero_offload.MemoryByteStore()
        >>> extent = store.allocate(16)
        >>> store.write(extent, torch.arange(4, dtype=torch.float32)).wait()
        >>> back = torch.empty(2)
        >>> store.read(extent, back, offset=8).wait()
        >>> back
        tensor([2., 3.])
        >>> store.close()
    """

    def __init__(self, capacity_bytes: int | None = None, *, asynchronous: bool = True, alignment: int = 4096) -> None:
        self.alignment = alignment
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._memory: dict[MemoryExtent, Any] = {}  # the results of `_made`
        self._next = self.allocated_bytes = 0
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory-store") if asynchronous else None

    @property
    def used_bytes(self) -> int:
        """Bytes of the extents that are allocated and not freed."""
        return self.allocated_bytes

    def reserve(self, total_bytes: int) -> None:
        self._check_room(total_bytes)

    def allocate(self, nbytes: int) -> MemoryExtent:
        self._check_open()
        if nbytes <= 0:
            raise ValueError(f"an extent of {nbytes} bytes")
        size = -(-nbytes // self.alignment) * self.alignment
        with self._lock:
            self._check_room(self.allocated_bytes + size)
            extent = MemoryExtent(self._next, size)
            self._memory[extent] = self._made(extent)
            self._next += size
            self.allocated_bytes += size
        return extent

    def _made(self, extent: MemoryExtent) -> Any:
        """An object that keeps the bytes of an extent, zeros at first."""
        return torch.zeros(extent.nbytes, dtype=torch.uint8)

    def free(self, extent: MemoryExtent) -> None:
        with self._lock:
            if self._memory.pop(extent, None) is None:
                raise ValueError(f"extent at {extent.offset_bytes} is not allocated")
            self.allocated_bytes -= extent.nbytes

    def read(self, extent: MemoryExtent, buffer: Any, offset: int = 0) -> Ticket:
        memory, target = self._range(extent, buffer, offset)
        return self._serve(target, memory[offset : offset + len(target)])

    def write(self, extent: MemoryExtent, buffer: Any, offset: int = 0) -> Ticket:
        memory, source = self._range(extent, buffer, offset)
        return self._serve(memory[offset : offset + len(source)], source)

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._memory.clear()

    def _range(self, extent: MemoryExtent, buffer: Any, offset: int) -> tuple[Any, Tensor]:
        """The object with the extent's bytes, and the buffer as uint8. Raises ValueError for bytes out of range."""
        self._check_open()
        data = bytes_of(buffer)
        if offset < 0 or offset + data.numel() > extent.nbytes:
            raise ValueError(f"bytes [{offset}, {offset + data.numel()}) of an extent of {extent.nbytes}")
        with self._lock:
            memory = self._memory.get(extent)
        if memory is None:
            raise ValueError(f"extent at {extent.offset_bytes} is not allocated")
        return memory, data

    def _serve(self, target: Tensor, source: Tensor) -> Ticket:
        if self._thread is not None:
            return Served([self._thread.submit(target.copy_, source)])
        target.copy_(source)
        return Served()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the {type(self).__name__} is closed")

    def _check_room(self, wanted: int) -> None:
        if self.capacity_bytes is not None and wanted > self.capacity_bytes:
            raise BudgetError(
                f"MemoryByteStore: {gib(wanted)} wanted, {gib(self.capacity_bytes)} there; raise capacity_bytes"
            )

"""Keeps bytes in memory: `MemoryByteStore`, the slow reference ByteStore, and `CompressedByteStore`, a tier.

The reference serves requests at once or on one thread. The tier compresses its bytes without loss by zstandard.

[Note: Why exponents compress]
The mantissas of trained values are noise, but their exponents are not: most of the weights of a matrix share a dozen.
So every chunk is split into four planes before it is compressed: all first bytes of its 32-bit words, all second ones,
and so on. The exponents of fp32 values are in the last plane, those of bf16 values in the second and the last. zstd
codes these planes in about 3 of 8 bits and stores the planes of mantissas as they are. Numbers hardly repeat, so zstd
gets the smallest table of repetitions that it takes. On weights in bf16, level 1 compressed 0.6 GB/s to 1/1.46; with
that table it compressed 1.5 GB/s to 1/1.50 (one thread of a 2-vCPU EPYC, 2026-11-23).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import BudgetError, ClosedError, gib
from .protocols import Ticket

CHUNK_BYTES = 1 << 20  # bytes compressed at a time
PLANES = 4


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
        return torch.zeros(extent.nbytes, dtype=torch.uint8, device="cpu")

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
            raise ClosedError(f"the {type(self).__name__} is closed; create another")

    def _check_room(self, wanted: int) -> None:
        room = self.capacity_bytes
        if room is not None and wanted > room:
            raise BudgetError(f"MemoryByteStore: {gib(wanted)} needed, {gib(room)} allowed; raise capacity_bytes")


@dataclass
class _Kept:
    extent: MemoryExtent
    chunks: list[bytes | None]  # compressed; None: zeros, never written
    changing: threading.Lock = field(default_factory=threading.Lock)  # held where a part of a chunk is replaced


class _Scratch(threading.local):
    """Each thread's own memory for a chunk, and its own compressor and decompressor. Each thread runs `__init__`."""

    def __init__(self, zstd: Any) -> None:
        self._planes, self._whole = bytearray(CHUNK_BYTES), torch.empty(CHUNK_BYTES, dtype=torch.uint8, device="cpu")
        fast = zstd.ZstdCompressionParameters.from_level(1, hash_log=6, min_match=7)
        self.compressor, self.decompressor = zstd.ZstdCompressor(compression_params=fast), zstd.ZstdDecompressor()

    def of(self, nbytes: int) -> tuple[Tensor, memoryview, Tensor]:
        """Memory for the planes of a chunk, as a tensor and as a buffer, and for the chunk itself."""
        raw = memoryview(self._planes)[:nbytes]
        return torch.frombuffer(raw, dtype=torch.uint8).view(PLANES, -1), raw, self._whole[:nbytes]


class CompressedByteStore(MemoryByteStore):
    """Host memory that keeps every extent in compressed chunks. Every byte comes back as it was written.

    capacity_gib: memory that one process's compressed chunks may take; None: no limit. A write that does not fit any
        more fails with BudgetError, because the compressed size of data is not known before it is written.
    ratio: bytes that `reserve` may promise for one byte of capacity. Above 1 it trusts the data to compress as well.
    threads: the number that compress and decompress. They compete with all other work on the CPU.

    Raises ModuleNotFoundError without the package zstandard, which the extra `compressed` installs.
    """

    def __init__(self, capacity_gib: float | None = None, *, ratio: float = 1.0, threads: int = 2) -> None:
        try:
            zstd: Any = importlib.import_module("zstandard")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "CompressedByteStore needs zstandard, which is not installed; pip install 'zero-offload[compressed]'"
            ) from error
        super().__init__(None if capacity_gib is None else int(capacity_gib * (1 << 30)), asynchronous=False)
        self.ratio = ratio
        self._used = 0
        self._local = _Scratch(zstd)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="compressed-store")

    @property
    def used_bytes(self) -> int:
        """Bytes of all compressed chunks."""
        return self._used

    def reserve(self, total_bytes: int) -> None:
        """Raises BudgetError if `total_bytes` would not fit at the ratio that was given."""
        if self.capacity_bytes is not None and total_bytes > self.capacity_bytes * self.ratio:
            raise BudgetError(
                f"CompressedByteStore: {total_bytes} bytes in all do not fit into {self.capacity_bytes} at "
                f"ratio={self.ratio:g}; raise capacity_gib. Or raise ratio if the data is known to compress better"
            )

    def _check_room(self, wanted: int) -> None:
        """No check: the compressed size is known only when bytes are written."""

    def _made(self, extent: MemoryExtent) -> Any:
        return _Kept(extent, [None] * -(-extent.nbytes // CHUNK_BYTES))

    def free(self, extent: MemoryExtent) -> None:
        kept: Any = self._memory.get(extent)
        super().free(extent)
        with self._lock:
            self._used -= sum(len(chunk or b"") for chunk in kept.chunks)

    def read(self, extent: MemoryExtent, buffer: Any, offset: int = 0) -> Ticket:
        return self._submit(self._read, extent, buffer, offset)

    def write(self, extent: MemoryExtent, buffer: Any, offset: int = 0) -> Ticket:
        return self._submit(self._write, extent, buffer, offset)

    def close(self) -> None:
        self._closed = True
        self._threads.shutdown(wait=True)
        super().close()
        self.allocated_bytes = self._used = 0

    def _submit(
        self, serve: Callable[[_Kept, int, int, Tensor], None], extent: MemoryExtent, buffer: Any, offset: int
    ) -> Ticket:
        """Begins to serve each chunk that the range touches, by serve(kept, chunk, start in the chunk, bytes)."""
        kept, data = self._range(extent, buffer, offset)
        stop = offset + data.numel()
        futures = []
        for chunk in range(offset // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
            first, last = max(offset, chunk * CHUNK_BYTES), min(stop, (chunk + 1) * CHUNK_BYTES)
            piece = data[first - offset : last - offset]
            futures.append(self._threads.submit(serve, kept, chunk, first - chunk * CHUNK_BYTES, piece))
        return Served(futures)

    def _read(self, kept: _Kept, chunk: int, start: int, target: Tensor) -> None:
        target.copy_(self._loaded(kept, chunk)[start : start + target.numel()])

    def _write(self, kept: _Kept, chunk: int, start: int, source: Tensor) -> None:
        if source.numel() == self._size(kept, chunk):
            self._keep(kept, chunk, source)
            return
        with kept.changing:
            whole = self._loaded(kept, chunk)
            whole[start : start + source.numel()].copy_(source)
            self._keep(kept, chunk, whole)

    @staticmethod
    def _size(kept: _Kept, chunk: int) -> int:
        return min(CHUNK_BYTES, kept.extent.nbytes - chunk * CHUNK_BYTES)

    def _loaded(self, kept: _Kept, chunk: int) -> Tensor:
        """(bytes of the chunk,) in this thread's own memory, valid until its next call."""
        size, packed = self._size(kept, chunk), kept.chunks[chunk]
        planes, raw, whole = self._local.of(size)
        if packed is None:
            return whole.zero_()
        with self._local.decompressor.stream_reader(packed) as reader:
            if reader.readinto(raw) != size:
                raise OSError(f"chunk {chunk} at {kept.extent.offset_bytes} does not decompress to {size} bytes")
        words = whole.view(-1, PLANES)
        for k in range(PLANES):  # one copy of the transpose takes six times as long
            words[:, k].copy_(planes[k])
        return whole

    def _keep(self, kept: _Kept, chunk: int, values: Tensor) -> None:
        planes, raw, _ = self._local.of(values.numel())
        words = values.view(-1, PLANES)
        for k in range(PLANES):
            planes[k].copy_(words[:, k])
        packed = self._local.compressor.compress(raw)
        with self._lock:
            used = self._used + len(packed) - len(kept.chunks[chunk] or b"")
            if self.capacity_bytes is not None and used > self.capacity_bytes:
                raise BudgetError(
                    f"CompressedByteStore: its {gib(self.allocated_bytes)} take more than {gib(self.capacity_bytes)} "
                    "when compressed; raise capacity_gib, or place less on this tier"
                )
            kept.chunks[chunk], self._used = packed, used

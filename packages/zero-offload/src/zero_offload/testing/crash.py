"""Simulates a ByteStore that crashes: writes since the last sync are lost, torn or complete, in any order."""

from __future__ import annotations

import errno
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import OffloadError
from ..memory_store import MemoryExtent, Served, bytes_of
from ..protocols import Ticket

SECTOR = 512  # bytes that a disk writes as a whole


class Crashed(BaseException):
    """The process has ended, as far as the store is concerned. No error of ours: nobody handles it."""


@dataclass(eq=False)
class CrashByteStore:
    """A NamedByteStore in memory. `after`: it raises Crashed at the write or sync of that number, and from then on.

    `crashed` makes the store that the next process finds. `lies`: its syncs do nothing. `calls`: writes and syncs so
    far.
    """

    name: str | None = "run"
    after: int | None = None
    lies: bool = False
    alignment: int = 4096
    found: bool = False
    calls: int = 0
    memory: bytearray = field(default_factory=bytearray)  # as a process sees it
    kept: bytearray = field(default_factory=bytearray)  # as the last sync left it
    since: list[tuple[int, bytes]] = field(default_factory=list)  # (offset, bytes) of each write after that sync
    _taken: dict[int, int] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # -- room ---------------------------------------------------------------------------------------------------

    def reserve(self, total_bytes: int) -> None:
        pass

    def allocate(self, nbytes: int) -> MemoryExtent:
        with self._lock:
            end = 0
            for start, size in sorted(self._taken.items()):
                if start - end >= self._size(nbytes):
                    break
                end = start + size
            return self._take(end, nbytes)

    def claim(self, offset_bytes: int, nbytes: int) -> MemoryExtent:
        with self._lock:
            stop = offset_bytes + self._size(nbytes)
            taken = any(offset_bytes < start + size and start < stop for start, size in self._taken.items())
            if stop > len(self.memory):
                raise OSError(errno.ENODATA, f"bytes [{offset_bytes}, {stop}) of {len(self.memory)}")
            if taken:
                raise OffloadError(f"bytes [{offset_bytes}, {stop}) are taken")
            return self._take(offset_bytes, nbytes)

    def free(self, extent: MemoryExtent) -> None:
        with self._lock:
            del self._taken[extent.offset_bytes]

    def _take(self, offset: int, nbytes: int) -> MemoryExtent:
        self._taken[offset] = self._size(nbytes)
        for image in (self.memory, self.kept):
            image.extend(bytes(max(0, offset + self._size(nbytes) - len(image))))
        return MemoryExtent(offset, nbytes)

    def _size(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // self.alignment) * self.alignment

    # -- bytes --------------------------------------------------------------------------------------------------

    def read(self, extent: MemoryExtent, buffer: Any, offset: int = 0) -> Ticket:
        target, first = bytes_of(buffer), extent.offset_bytes + offset
        if target.numel():
            target.copy_(torch.frombuffer(self.memory[first : first + target.numel()], dtype=torch.uint8))
        return Served()

    def write(self, extent: MemoryExtent, buffer: Any, offset: int = 0) -> Ticket:
        first, data = extent.offset_bytes + offset, bytes_of(buffer).numpy().tobytes()
        with self._lock:
            self.since.append((first, data))  # a crash in this call tears it
            self._count()
            self.memory[first : first + len(data)] = data
        return Served()

    def sync(self) -> None:
        with self._lock:
            self._count()
            if not self.lies:
                self.kept[:] = self.memory
                self.since.clear()

    def _count(self) -> None:
        self.calls += 1
        if self.after is not None and self.calls >= self.after:
            raise Crashed(f"at call {self.calls}")

    def crashed(self, generator: random.Random, *, power: bool = True) -> CrashByteStore:
        """The store that is found after a power cut: it has any sectors of each write since the last sync. Without
        `power`, after the process was killed: it has every write that was over, and any sectors of one that was not."""
        image = bytearray(self.kept if power else self.memory)
        over = self.after is None or self.calls < self.after
        for first, data in self.since if power else self.since[len(self.since) if over else -1 :]:
            share = generator.choice((0.0, 0.5, 1.0))
            for at in range(0, len(data), SECTOR):
                if generator.random() < share:
                    part = data[at : at + SECTOR]
                    image[first + at : first + at + len(part)] = part
        return CrashByteStore(self.name, lies=self.lies, alignment=self.alignment, found=True, memory=image,
                              kept=bytearray(image))  # fmt: skip

    def remove(self) -> None:
        self.memory.clear()

    def close(self) -> None:
        pass

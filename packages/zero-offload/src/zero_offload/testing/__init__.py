"""Helps to test implementations: conformance suites, and ByteStores that fail, wait, watch or crash on demand.

After a crash, writes since the last sync are lost, torn or complete, in any order.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import OffloadError
from ..memory_store import MemoryExtent, Served, bytes_of
from ..protocols import ByteStore, Ticket
from .conformance import ByteStoreSuite, UpdateStepSuite

__all__ = ["ByteStoreSuite", "CrashByteStore", "Crashed", "FaultyByteStore", "HeldTicket", "UpdateStepSuite"]

SECTOR = 512  # bytes that a disk writes as a whole


class HeldTicket:
    """The ticket of a request that `FaultyByteStore` keeps back until `release`, or until it is waited for."""

    def __init__(self, begin: Callable[[], Ticket], gate: threading.Event, *, lazy: bool = False) -> None:
        self._begin, self._gate, self._lazy = begin, gate, lazy
        self._ticket: Ticket | None = None
        self._lock = threading.Lock()

    def _inner(self) -> Ticket:
        with self._lock:
            if self._ticket is None:
                self._ticket = self._begin()
            return self._ticket

    def done(self) -> bool:
        if self._lazy and self._ticket is None:
            return False
        return self._gate.is_set() and self._inner().done()

    def wait(self, timeout: float | None = None) -> None:
        if not self._gate.wait(timeout):
            raise TimeoutError(f"the request is not done after {timeout} seconds")
        self._inner().wait(timeout)


class FaultyByteStore:
    """Passes everything to `inner` until told to fail. Errors carry `path` and `offset`, as a file's do.

    fail("read" or "write", after=n): the request after the next n fails with EIO, and every one after that.
    hold(): requests stay pending until release(), and touch their buffer only then. lazy: they stay pending until
    somebody waits for their ticket, so that whoever relies on a transfer without waiting for it is found out.
    `log`: ("read" | "write", offset, nbytes) in order of submission.
    `overtaken`: requests submitted while a write of the same bytes was pending; stays empty for a correct user.
    `changed`: (offset, nbytes) of writes that were held, and whose memory changed meanwhile; stays empty as well.
    """

    def __init__(self, inner: ByteStore, path: str = "/faulty/slab", *, lazy: bool = False) -> None:
        self.inner, self.path, self.lazy = inner, path, lazy
        self.alignment = inner.alignment
        self.reserve, self.allocate, self.free = inner.reserve, inner.allocate, inner.free
        self.log: list[tuple[str, int, int]] = []
        self.overtaken: list[tuple[int, int]] = []
        self.changed: list[tuple[int, int]] = []
        self._countdown: dict[str, int] = {}
        self._gate = threading.Event()
        self._gate.set()
        self._lock = threading.Lock()
        self._writing: dict[int, tuple[int, Ticket]] = {}

    def fail(self, kind: str, *, after: int = 0) -> None:
        """Makes each "read" or "write" fail, after `after` more that succeed."""
        self._countdown[kind] = after

    def hold(self) -> None:
        """Keeps requests from being served until `release`."""
        self._gate = threading.Event()

    def release(self) -> None:
        self._gate.set()

    def close(self) -> None:
        """Serves the writes that are still held."""
        self.release()
        for _, ticket in list(self._writing.values()):
            ticket.wait()
        self.inner.close()

    def read(self, extent: Any, buffer: Any, offset: int = 0) -> Ticket:
        return self._submit("read", extent, buffer, offset)

    def write(self, extent: Any, buffer: Any, offset: int = 0) -> Ticket:
        return self._submit("write", extent, buffer, offset)

    def _submit(self, kind: str, extent: Any, buffer: Any, offset: int) -> Ticket:
        at = extent.offset_bytes + offset
        with self._lock:
            memory = bytes_of(buffer)
            nbytes = memory.nbytes
            self.log.append((kind, at, nbytes))
            self._writing = {a: (n, ticket) for a, (n, ticket) in self._writing.items() if not ticket.done()}
            if any(a < at + nbytes and at < a + n for a, (n, _) in self._writing.items()):
                self.overtaken.append((at, nbytes))
            if kind in self._countdown:
                self._countdown[kind] -= 1
                if self._countdown[kind] < 0:
                    return self._failed(at)
        submit = self.inner.read if kind == "read" else self.inner.write
        ticket: Ticket
        if self._gate.is_set() and not self.lazy:
            ticket = submit(extent, buffer, offset)
        else:
            before = memory.clone()

            def begin() -> Ticket:
                if kind == "write" and not torch.equal(memory, before):
                    self.changed.append((at, nbytes))
                return submit(extent, buffer, offset)

            ticket = HeldTicket(begin, self._gate, lazy=self.lazy)
        if kind == "write":
            with self._lock:
                self._writing[at] = (nbytes, ticket)
        return ticket

    def _failed(self, at: int) -> Ticket:
        """The ticket of a request that failed, with the error that a file would raise at this offset."""
        part = Future[None]()
        part.set_exception(type("ErrorAt", (OSError,), {"offset": at})(errno.EIO, "Input/output error", self.path))
        return Served([part])


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

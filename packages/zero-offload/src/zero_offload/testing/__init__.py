"""Helps to test implementations: the conformance suites, and a ByteStore that fails, waits and watches on demand."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from ..memory_store import Served, bytes_of
from ..protocols import ByteStore, Ticket
from .conformance import ByteStoreSuite, UpdateStepSuite
from .crash import CrashByteStore, Crashed

__all__ = ["ByteStoreSuite", "CrashByteStore", "Crashed", "FaultyByteStore", "HeldTicket", "UpdateStepSuite"]


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

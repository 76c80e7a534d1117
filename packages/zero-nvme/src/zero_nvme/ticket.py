"""The handle of a submitted request, and waiting: for one, any, all, from threads and from asyncio."""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from zero_nvme.buffers import _native
from zero_nvme.errors import Cancelled, NvmeError

if TYPE_CHECKING:
    from zero_nvme.engine import Engine

Failure = tuple[int, int, int, int, int]  # errno, index of the path, offset, bytes wanted, bytes got


class EventLike(Protocol):
    def fileno(self) -> int: ...
    def clear(self) -> None: ...
    def wait(self, timeout_seconds: float | None = None) -> bool: ...


class RequestLike(Protocol):
    """What a backend's request can do, native or portable."""

    def done(self) -> bool: ...
    def wait(self, timeout_seconds: float | None = None) -> bool: ...
    def failure(self) -> Failure | None: ...
    def cancel(self) -> None: ...
    def cancelled(self) -> bool: ...
    def notify(self, event: EventLike) -> None: ...


class Ticket:
    """One submitted read or write. Complete by itself: nobody needs to wait for that.

    The buffer is kept alive and must not be touched (read: not read; write: not changed) until `done()`.
    `await ticket` gives the number of bytes; cancelling the awaiting task cancels the request and returns once none of
    it is in flight. Safe to use from any thread.
    """

    __slots__ = ("__weakref__", "_check", "_engine", "_request", "nbytes")

    def __init__(
        self, request: RequestLike, engine: Engine, nbytes: int, check: Callable[[], None] | None = None
    ) -> None:
        self._request = request
        self._engine = engine
        self._check = check
        self.nbytes = nbytes

    def done(self) -> bool:
        """True once the request has succeeded, failed or been cancelled. Never blocks."""
        return self._request.done()

    def wait(self, timeout: float | None = None) -> None:
        """Waits up to `timeout` seconds (None: for ever; Ctrl-C interrupts).

        Raises the request's error: NvmeError (with path, offset, wanted and got), ChecksumError, Cancelled; and
        TimeoutError, after which the request is still going.
        """
        self._engine.check_process()
        if not self._request.wait(timeout):
            raise TimeoutError(f"{self._engine.describe()}: a request of {self.nbytes} bytes took over {timeout} s")
        self._raise_error()

    def result(self, timeout: float | None = None) -> int:
        """Waits like wait(); the number of bytes moved, which is all of them."""
        self.wait(timeout)
        return self.nbytes

    def cancel(self) -> bool:
        """Drops what has not started; what has is waited for by the kernel, so wait() is due before reuse of the buffer.

        Returns False if the request was complete already. wait() then raises Cancelled, or returns if nothing was
        left to drop.
        """
        if self.done():
            return False
        self._request.cancel()
        return True

    def exception(self) -> NvmeError | None:
        """The error of a complete request, None if it succeeded. Raises ValueError before completion."""
        if not self.done():
            raise ValueError("the request is not complete; wait() for it first")
        try:
            self._raise_error()
        except NvmeError as error:
            return error
        return None

    def _raise_error(self) -> None:
        failure = self._request.failure()
        if failure is not None:
            raise self._engine.error_of(failure)
        if self._request.cancelled():
            raise Cancelled(f"{self._engine.describe()}: a request of {self.nbytes} bytes was cancelled")
        if self._check is not None:
            self._check()
            self._check = None

    def __await__(self) -> Generator[object, None, int]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> int:
        self._engine.check_process()
        if not self.done():
            watcher = _Watcher.of(asyncio.get_running_loop())
            try:
                await watcher.completion(self._request)
            except asyncio.CancelledError:
                self._request.cancel()
                while not self.done():  # the kernel may still be writing into the caller's buffer
                    try:
                        await watcher.completion(self._request)
                    except asyncio.CancelledError:
                        continue
                raise
        self._raise_error()
        return self.nbytes

    def __repr__(self) -> str:
        return f"<Ticket of {self.nbytes} bytes, {'done' if self.done() else 'in flight'}>"


class PortableEvent:
    """An eventfd, without the extension."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._fd

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass

    def wait(self, timeout_seconds: float | None = None) -> bool:
        return bool(select.select([self._fd], [], [], timeout_seconds)[0])

    def __del__(self) -> None:
        os.close(self._fd)


def new_event() -> EventLike:
    return _native.Event() if _native is not None else PortableEvent()


class _Watcher:
    """One event loop's eventfd: requests signal it, the loop's reader resolves futures."""

    _watchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watcher] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._event = new_event()
        self._waiting: list[tuple[RequestLike, asyncio.Future[None]]] = []

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Watcher:
        watcher = cls._watchers.get(loop)
        if watcher is None:
            watcher = cls._watchers[loop] = cls(loop)
        return watcher

    def completion(self, request: RequestLike) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.add_reader(self._event.fileno(), self._resolve)
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append((request, future))
        request.notify(self._event)
        return future

    def _resolve(self) -> None:
        self._event.clear()
        waiting = []
        for request, future in self._waiting:
            if not request.done():
                waiting.append((request, future))
            elif not future.done():
                future.set_result(None)
        self._waiting = waiting
        loop = self._loop()
        if not waiting and loop is not None:
            loop.remove_reader(self._event.fileno())


_thread = threading.local()  # .event: for wait_any


def wait_any(tickets: Iterable[Ticket], timeout: float | None = None) -> list[Ticket]:
    """Waits until at least one is done and returns all that are, in the order given. Raises no request's error.

    Raises TimeoutError after `timeout` seconds, ValueError for no tickets.
    """
    pending = list(tickets)
    if not pending:
        raise ValueError("wait_any of no tickets would wait for ever")
    deadline = None if timeout is None else time.monotonic() + timeout
    if not hasattr(_thread, "event") or _thread.process != os.getpid():
        _thread.event, _thread.process = new_event(), os.getpid()
    event: EventLike = _thread.event
    for ticket in pending:
        ticket._engine.check_process()
        ticket._request.notify(event)
    while True:
        event.clear()
        done = [ticket for ticket in pending if ticket.done()]
        if done:
            return done
        if not event.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"none of {len(pending)} requests completed within {timeout} s")


def wait_all(tickets: Sequence[Ticket], timeout: float | None = None) -> None:
    """Waits until all are done, then raises the first error in the order given, if there is one.

    Raises TimeoutError after `timeout` seconds in all; the requests are then still going.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    first: NvmeError | None = None
    for ticket in tickets:
        try:
            ticket.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except NvmeError as error:
            first = first or error
    if first is not None:
        raise first

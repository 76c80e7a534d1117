"""The handle of a submitted request, and waiting: for one, any, all, from threads and from asyncio."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from zero_nvme.errors import Cancelled, NvmeError
from zero_nvme.extension import native

if TYPE_CHECKING:
    from zero_nvme.engine import Engine

Failure = tuple[int, int, int, int, int]  # errno, index of the path, offset, bytes wanted, bytes got


class MailboxLike(Protocol):
    """Tells which of many requests completed. Its descriptor is readable while there is something to take."""

    def fileno(self) -> int: ...
    def post(self, token: int) -> None: ...
    def take(self) -> list[int]: ...
    def wait(self, timeout_seconds: float | None = None) -> bool: ...


class RequestLike(Protocol):
    """What a backend's request can do, native or portable."""

    def done(self) -> bool: ...
    def wait(self, timeout_seconds: float | None = None) -> bool: ...
    def failure(self) -> Failure | None: ...
    def cancel(self) -> None: ...
    def cancelled(self) -> bool: ...
    def notify(self, mailbox: MailboxLike, token: int) -> None: ...


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
        """Drops what has not started. The rest is in flight: wait() before the buffer is used again.

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


class PortableMailbox:
    """What `_native.Mailbox` is, without the extension."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._tokens: deque[int] = deque()

    def fileno(self) -> int:
        return self._fd

    def post(self, token: int) -> None:
        self._tokens.append(token)
        os.eventfd_write(self._fd, 1)

    def take(self) -> list[int]:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass  # nothing was posted
        return [self._tokens.popleft() for _ in range(len(self._tokens))]

    def wait(self, timeout_seconds: float | None = None) -> bool:
        return bool(select.select([self._fd], [], [], timeout_seconds)[0])

    def __del__(self) -> None:
        os.close(self._fd)


def new_mailbox() -> MailboxLike:
    return native.Mailbox() if native is not None else PortableMailbox()


class _Watcher:
    """One event loop's mailbox: requests post to it, the loop's reader resolves their futures."""

    _watchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watcher] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._mailbox = new_mailbox()
        self._tokens = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Watcher:
        watcher = cls._watchers.get(loop)
        if watcher is None:
            watcher = cls._watchers[loop] = cls(loop)
        return watcher

    async def completion(self, request: RequestLike) -> None:
        loop = asyncio.get_running_loop()
        token = next(self._tokens)
        if not self._waiting:
            loop.add_reader(self._mailbox.fileno(), self._resolve)
        future = self._waiting[token] = loop.create_future()
        request.notify(self._mailbox, token)
        try:
            await future
        finally:
            self._forget(token)

    def _resolve(self) -> None:
        for token in self._mailbox.take():
            future = self._waiting.get(token)
            if future is not None and not future.done():
                future.set_result(None)

    def _forget(self, token: int) -> None:
        self._waiting.pop(token, None)
        loop = self._loop()
        if not self._waiting and loop is not None and not loop.is_closed():
            loop.remove_reader(self._mailbox.fileno())


_thread = threading.local()  # .mailbox, .process: for wait_any


def wait_any(tickets: Iterable[Ticket], timeout: float | None = None) -> list[Ticket]:
    """Waits until at least one is done and returns all that are, in the order given. Raises no request's error.

    Raises TimeoutError after `timeout` seconds, ValueError for no tickets.
    """
    pending = list(tickets)
    if not pending:
        raise ValueError("wait_any of no tickets would wait for ever")
    deadline = None if timeout is None else time.monotonic() + timeout
    if getattr(_thread, "process", None) != os.getpid():
        _thread.mailbox, _thread.process = new_mailbox(), os.getpid()
    mailbox: MailboxLike = _thread.mailbox
    for ticket in pending:
        ticket._engine.check_process()
        ticket._request.notify(mailbox, 0)
    while True:
        mailbox.take()
        done = [ticket for ticket in pending if ticket.done()]
        if done:
            return done
        if not mailbox.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
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

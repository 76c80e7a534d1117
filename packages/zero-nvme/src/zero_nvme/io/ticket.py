"""Defines a request's handle and waits: for one, any or all requests, from threads and from asyncio."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from zero_nvme.errors import Cancelled, NvmeError
from zero_nvme.extension import native

if TYPE_CHECKING:
    from zero_nvme._native import Mailbox, Request


class Ticket:
    """One read or write that was submitted. It completes whether or not anybody waits for it.

    The ticket keeps the buffer alive. Until `done()`, do not use a buffer that is read into, nor change one that is
    written. `await ticket` returns the number of bytes. Cancelling the awaiting task cancels the request and returns
    once none of it is in flight. A ticket may be used from any thread.
    """

    __slots__ = ("__weakref__", "_check", "_queue", "_request", "nbytes")

    def __init__(self, request: Request, queue: Any, nbytes: int, check: Callable[[], None] | None = None) -> None:
        """queue: the io_queue.IOQueue that the request is in."""
        self._request = request
        self._queue = queue
        self._check = check
        self.nbytes = nbytes

    def done(self) -> bool:
        """True once the request has succeeded, failed or been cancelled. Never blocks."""
        return self._request.done()

    def wait(self, timeout: float | None = None) -> None:
        """Waits up to `timeout` seconds, or without a limit. Ctrl-C interrupts it.

        Raises the request's error: NvmeError (with path, offset, wanted and got), ChecksumError or Cancelled. After a
        TimeoutError the request is still in flight.
        """
        self._queue._check_process()
        if not self._request.wait(timeout):
            raise TimeoutError(f"{self._queue._label}: a request of {self.nbytes} bytes took over {timeout} s")
        self._raise_error()

    def result(self, timeout: float | None = None) -> int:
        """Waits like wait() and returns the number of bytes moved, which is all of them."""
        self.wait(timeout)
        return self.nbytes

    def cancel(self) -> bool:
        """Drops the part that has not started. The rest is in flight, so wait() before you use the buffer again.

        Returns False if the request was already complete. After True, wait() raises Cancelled, or returns normally if
        everything had already started.
        """
        if self.done():
            return False
        self._request.cancel()
        return True

    def exception(self) -> NvmeError | None:
        """Returns the error of a complete request, or None if it succeeded. Raises ValueError before completion."""
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
            raise self._queue._error_of(failure)
        if self._request.cancelled():
            raise Cancelled(f"{self._queue._label}: a request of {self.nbytes} bytes was cancelled")
        if self._check is not None:
            self._check()
            self._check = None

    def __await__(self) -> Generator[object, None, int]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> int:
        self._queue._check_process()
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


def new_mailbox() -> Mailbox:
    if native is not None:
        return native.Mailbox()
    from zero_nvme.io.aiofiles_backend import PortableMailbox

    mailbox: Any = PortableMailbox()
    return mailbox


class _Watcher:
    """Resolves the futures of one event loop, when requests post their tokens to its mailbox."""

    _watchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watcher] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._mailbox = new_mailbox()
        self._tokens = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Watcher:
        watcher = cls._watchers.get(loop)
        if watcher is None:
            watcher = cls._watchers[loop] = cls()
        return watcher

    async def completion(self, request: Request) -> None:
        loop = asyncio.get_running_loop()
        token = next(self._tokens)
        if not self._waiting:
            loop.add_reader(self._mailbox.fileno(), self._resolve)
        future = self._waiting[token] = loop.create_future()
        request.notify(self._mailbox, token)
        try:
            await future
        finally:
            self._waiting.pop(token)
            if not self._waiting and not loop.is_closed():
                loop.remove_reader(self._mailbox.fileno())

    def _resolve(self) -> None:
        for token in self._mailbox.take():
            future = self._waiting.get(token)
            if future is not None and not future.done():
                future.set_result(None)


_thread = threading.local()  # .mailbox, .process: for wait_any


def wait_any(tickets: Iterable[Ticket], timeout: float | None = None) -> list[Ticket]:
    """Waits until at least one ticket is done and returns all that are, in the order given.

    Raises TimeoutError after `timeout` seconds, ValueError for no tickets, and never a request's error.
    """
    pending = list(tickets)
    if not pending:
        raise ValueError("wait_any of no tickets would wait for ever")
    deadline = None if timeout is None else time.monotonic() + timeout
    if getattr(_thread, "process", None) != os.getpid():
        _thread.mailbox, _thread.process = new_mailbox(), os.getpid()
    mailbox: Mailbox = _thread.mailbox
    for ticket in pending:
        ticket._queue._check_process()
        ticket._request.notify(mailbox, 0)
    while True:
        mailbox.take()
        done = [ticket for ticket in pending if ticket.done()]
        if done:
            return done
        if not mailbox.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"none of {len(pending)} reads and writes ended within {timeout} s, and they go on")


def wait_all(tickets: Sequence[Ticket], timeout: float | None = None) -> None:
    """Waits until all tickets are done, then raises the first error in the order given, if there is one.

    Raises TimeoutError after `timeout` seconds in total. The requests are then still in flight.
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

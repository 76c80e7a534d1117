"""Implements `_native`'s interface in Python, as the `aiofiles` backend, where the extension cannot be built.

An event loop on a thread of its own runs at most `threads` transfers per path at a time, through the page cache. It is
slow, but has the same errors and counters and resumes short reads in the same way.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import select
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import aiofiles

from zero_nvme.buffers import Memory, bytes_at

if TYPE_CHECKING:
    from zero_nvme._native import Failure, Mailbox


class PortableMailbox:
    """The same interface as `_native.Mailbox`, in Python."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._tokens: deque[int] = deque()

    def fileno(self) -> int:
        return self._fd

    def post(self, token: int) -> None:
        self._tokens.append(token)
        os.eventfd_write(self._fd, 1)

    def take(self) -> list[int]:
        with suppress(BlockingIOError):  # there are no tokens
            os.eventfd_read(self._fd)
        return [self._tokens.popleft() for _ in range(len(self._tokens))]

    def wait(self, timeout_seconds: float | None = None) -> bool:
        return bool(select.select([self._fd], [], [], timeout_seconds)[0])

    def __del__(self) -> None:
        os.close(self._fd)


class PortableRequest:
    """A request that the loop's thread serves, block by block, and that any thread may wait for."""

    served: concurrent.futures.Future[Any]

    def __init__(self, keep: object) -> None:
        self.keep: object = keep
        self.dropped = False
        self.skipped = 0
        self._failure: Failure | None = None
        self._cancelled = False

    def done(self) -> bool:
        return self.served.done()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        return bool(concurrent.futures.wait([self.served], timeout_seconds).done)

    def failure(self) -> Failure | None:
        return self._failure

    def fail(self, failure: Failure) -> None:
        self._failure = self._failure or failure
        self.dropped = True

    def cancel(self) -> None:
        self._cancelled = self.dropped = True

    def cancelled(self) -> bool:
        return self._cancelled and self.skipped > 0 and self._failure is None

    def notify(self, mailbox: Mailbox, token: int) -> None:
        self.served.add_done_callback(lambda _: mailbox.post(token))


class PortableStore:
    """The same interface as `_native.Store`, over aiofiles."""

    def __init__(
        self,
        *,
        files: Sequence[tuple[int, bool, int, int]],
        pattern: Sequence[int],
        backend: str,
        block_bytes: int,
        inflight_bytes: int,
        depth: int,
        threads: int,
        max_requests: int,
    ) -> None:
        if any(direct for _, direct, _, _ in files):
            raise OSError(errno.EINVAL, f"{backend}: it has no way to do O_DIRECT")
        self._pattern = list(pattern)
        self._block_bytes = block_bytes
        self._max_requests = max_requests
        self._lock = threading.RLock()  # `with` gives it back in C, where Ctrl-C cannot come between
        self._changed = threading.Condition(self._lock)
        self._live: set[PortableRequest] = set()
        names = ("bytes", "blocks", "retries", "failures", "bounced_bytes")
        self._counters: list[dict[str, Any]] = [
            {"read": dict.fromkeys(names, 0), "write": dict.fromkeys(names, 0), "registered_file": False} for _ in files
        ]
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._files = [f"/proc/self/fd/{fd}" for fd, *_ in files]  # they may have no name
        at_once = max(1, min(threads, depth, inflight_bytes // block_bytes))
        self._slots = [asyncio.Semaphore(at_once) for _ in files]  # of each path; a block takes one
        self._thread = threading.Thread(target=self._run, name="zero_nvme aiofiles", daemon=True)
        self._thread.start()

    # -- on the caller's thread

    def submit(self, write: bool, offset: int, address: int, nbytes: int, keep: object) -> PortableRequest:
        request = PortableRequest(keep)
        with self._lock:
            self._changed.wait_for(lambda: self._closing or len(self._live) < self._max_requests)
            if self._closing:
                raise ValueError("closed")
            serving = self._serve(request, write, offset, Memory(address, nbytes, None))
            request.served = asyncio.run_coroutine_threadsafe(serving, self._loop)
            self._live.add(request)
        request.served.add_done_callback(lambda _: self._ended(request))
        return request

    def drain(self, timeout_seconds: float | None = None) -> bool:
        with self._lock:
            if threading.current_thread() is self._thread:
                return True  # the garbage collector closes a queue there: while it waits, nothing can complete
            return self._changed.wait_for(lambda: not self._live, timeout_seconds)

    def cancel(self) -> None:
        with self._lock:
            for request in self._live:
                request.cancel()

    def pending(self) -> int:
        return len(self._live)

    def statistics(self) -> list[dict[str, Any]]:
        return [
            {**counters, **{kind: dict(counters[kind]) for kind in ("read", "write")}} for counters in self._counters
        ]

    def close(self) -> None:
        """May be called again, also after Ctrl-C. On the loop's thread it does not wait, and the thread ends later."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()  # wakes threads that wait for room in submit()
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._stop_if_done)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def abandon(self) -> None:
        self._closing = True  # the thread does not exist in a forked child

    # -- on the loop's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self, request: PortableRequest, write: bool, offset: int, memory: Memory) -> None:
        await asyncio.gather(*(self._work(request, write, *block) for block in self._cut(offset, memory)))
        request.keep = None

    def _ended(self, request: PortableRequest) -> None:
        """Called when the request is done, so that a thread that finds no live request finds every request done."""
        with self._lock:
            self._live.discard(request)
            self._changed.notify_all()
        self._loop.call_soon_threadsafe(self._stop_if_done)

    async def _work(self, request: PortableRequest, write: bool, path: int, offset: int, memory: Memory) -> None:
        async with self._slots[path]:
            if request.dropped:
                request.skipped += memory.nbytes
            else:
                await self._move(request, write, path, offset, memory)

    def _stop_if_done(self) -> None:
        if self._closing and not self._live:
            self._loop.stop()

    async def _move(self, request: PortableRequest, write: bool, path: int, offset: int, memory: Memory) -> None:
        direction = self._counters[path]["write" if write else "read"]
        moved = 0
        try:
            view = bytes_at(memory)
            mode: Any = "r+b" if write else "rb"
            async with aiofiles.open(self._files[path], mode, buffering=0) as handle:  # a position of its own
                while moved < len(view):
                    await handle.seek(offset + moved)
                    step = await (handle.write if write else handle.readinto)(view[moved:])
                    if not step:
                        raise OSError(errno.EIO if write else errno.ENODATA, "no progress")
                    direction["retries"] += moved > 0
                    moved += step
        except Exception as error:  # an exception that escaped would leave the request waiting forever
            direction["failures"] += 1
            code = getattr(error, "errno", None) or errno.EIO
            request.fail((code, path, offset, memory.nbytes, moved))
        else:
            direction["bytes"] += moved
            direction["blocks"] += 1

    def _cut(self, offset: int, memory: Memory) -> Iterator[tuple[int, int, Memory]]:
        """Yields the path, the offset in its file, and the memory of each block."""
        at = 0
        while at < memory.nbytes:
            path, place, room = self._place(offset + at)
            size = min(room, self._block_bytes, memory.nbytes - at)
            yield path, place, Memory(memory.address + at, size, None)
            at += size

    def _place(self, offset: int) -> tuple[int, int, int]:
        """Returns the path, the offset in its file and the bytes left in the unit, like StripeMap::place in C++."""
        unit, within = divmod(offset, self._block_bytes)
        period, index = divmod(unit, len(self._pattern))
        path = self._pattern[index]
        unit_of_path = period * self._pattern.count(path) + self._pattern[:index].count(path)
        return path, unit_of_path * self._block_bytes + within, self._block_bytes - within

"""The `aiofiles` backend: the store's interface in pure Python, for where the extension cannot be built.

An event loop on a thread of its own runs at most `threads` transfers at a time through aiofiles, through the page
cache. Slow, and complete: the same errors, the same short reads resumed, the same counters.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import aiofiles

from zero_nvme.buffers import Memory, bytes_at
from zero_nvme.ticket import Failure, MailboxLike


class PortableRequest:
    """Counts its blocks down on the loop's thread; waited for from any."""

    def __init__(self, nbytes: int, keep: object) -> None:
        self.keep: object = keep
        self.dropped = False
        self.skipped = 0
        self._remaining = nbytes
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._notified: set[tuple[MailboxLike, int]] = set()
        self._failure: Failure | None = None
        self._cancelled = False

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        return self._done.wait(timeout_seconds)

    def failure(self) -> Failure | None:
        return self._failure

    def fail(self, failure: Failure) -> None:
        self._failure = self._failure or failure
        self.dropped = True

    def cancel(self) -> None:
        self._cancelled = self.dropped = True

    def cancelled(self) -> bool:
        return self._cancelled and self.skipped > 0 and self._failure is None

    def notify(self, mailbox: MailboxLike, token: int) -> None:
        with self._lock:
            if not self._done.is_set():
                self._notified.add((mailbox, token))
                return
        mailbox.post(token)

    def finish(self, nbytes: int) -> bool:
        """True once all its bytes are settled."""
        self._remaining -= nbytes
        return self._remaining == 0

    def complete(self) -> None:
        self.keep = None
        with self._lock:
            self._done.set()
            notified, self._notified = self._notified, set()
        for mailbox, token in notified:
            mailbox.post(token)


class PortableStore:
    """What `_native.Store` is, over aiofiles. Constructed with the same keywords."""

    def __init__(
        self,
        *,
        files: Sequence[tuple[int, bool, int, int]],
        pattern: Sequence[int],
        unit_bytes: int,
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
        self._unit_bytes = unit_bytes
        self._block_bytes = block_bytes
        self._max_requests = max_requests
        self._changed = threading.Condition()
        self._live: set[PortableRequest] = set()
        self._counters = [_new_counters() for _ in files]
        self._queues: list[deque[_Block]] = [deque() for _ in files]
        self._workers = max(1, min(threads, depth, inflight_bytes // block_bytes or 1))
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._wake: list[asyncio.Semaphore] = []
        started: list[BaseException | None] = []
        ready = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=([fd for fd, *_ in files], ready, started), name="zero_nvme aiofiles", daemon=True
        )
        self._thread.start()
        ready.wait()
        if started[0] is not None:
            self._thread.join()
            raise started[0]

    # -- the caller's side

    def submit(self, write: bool, offset: int, address: int, nbytes: int, keep: object) -> PortableRequest:
        if self._closing:
            raise ValueError("closed")
        request = PortableRequest(nbytes, keep)
        blocks = list(self._cut(request, write, offset, Memory(address, nbytes, keep)))
        with self._changed:
            self._changed.wait_for(lambda: len(self._live) < self._max_requests)
            if blocks:
                self._live.add(request)
        if not blocks:
            request.complete()
            return request
        self._loop.call_soon_threadsafe(self._enqueue, blocks)
        return request

    def drain(self, timeout_seconds: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._live, timeout_seconds)

    def cancel(self) -> None:
        with self._changed:
            for request in self._live:
                request.cancel()

    def pending(self) -> int:
        return len(self._live)

    def register_buffer(self, address: int, nbytes: int, keep: object) -> int:
        return -errno.EOPNOTSUPP

    def statistics(self) -> list[dict[str, Any]]:
        return [
            {
                "read": {**counters["read"], "latency_nanoseconds": dict(counters["read"]["latency_nanoseconds"])},
                "write": {**counters["write"], "latency_nanoseconds": dict(counters["write"]["latency_nanoseconds"])},
                "depth": dict(counters["depth"]),
                "registered_file": False,
            }
            for counters in self._counters
        ]

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self.drain(None)
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def abandon(self) -> None:
        self._closing = True  # a forked child: the thread is not here

    # -- the loop's side

    def _run(self, fds: Sequence[int], ready: threading.Event, started: list[BaseException | None]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(fds, ready, started))
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _serve(self, fds: Sequence[int], ready: threading.Event, started: list[BaseException | None]) -> None:
        self._wake = [asyncio.Semaphore(0) for _ in fds]
        handles: list[list[Any]] = []
        try:
            for fd in fds:
                handles.append([])
                for _ in range(self._workers):
                    handles[-1].append(await _reopen(fd))
        except OSError as error:
            started.append(error)
            ready.set()
        else:
            started.append(None)
            ready.set()
            await asyncio.gather(
                *(self._work(index, handle) for index, same_path in enumerate(handles) for handle in same_path)
            )
        for handle in (handle for same_path in handles for handle in same_path):
            await handle.close()

    def _enqueue(self, blocks: list[_Block]) -> None:
        for block in blocks:
            self._queues[block.path].append(block)
            self._wake[block.path].release()

    def _stop(self) -> None:
        for wake in self._wake:
            for _ in range(self._workers):
                wake.release()

    async def _work(self, path: int, handle: Any) -> None:
        while True:
            await self._wake[path].acquire()
            if not self._queues[path]:
                return
            block = self._queues[path].popleft()
            request = block.request
            if request.dropped:
                request.skipped += block.memory.nbytes
            else:
                await self._move(block, handle)
            if request.finish(block.memory.nbytes):
                request.complete()  # first: whoever finds nothing live finds every request done
                with self._changed:
                    self._live.discard(request)
                    self._changed.notify_all()

    async def _move(self, block: _Block, handle: Any) -> None:
        counters = self._counters[block.path]
        direction = counters["write" if block.write else "read"]
        counters["in_flight"] += 1
        counters["depth"][counters["in_flight"]] += 1
        start = time.perf_counter_ns()
        moved = 0
        try:
            view = bytes_at(block.memory)
            while moved < len(view):
                await handle.seek(block.offset + moved)
                if block.write:
                    step = await handle.write(view[moved:])
                else:
                    step = await handle.readinto(view[moved:])
                if not step:
                    raise OSError(errno.EIO if block.write else errno.ENODATA, "no progress")
                direction["retries"] += moved > 0
                moved += step
        except Exception as error:  # a worker that died would leave the request waiting for ever
            direction["failures"] += 1
            code = getattr(error, "errno", None) or errno.EIO
            block.request.fail((code, block.path, block.offset, block.memory.nbytes, moved))
        else:
            direction["bytes"] += moved
            direction["blocks"] += 1
            elapsed = time.perf_counter_ns() - start
            direction["latency_nanoseconds"][elapsed] += 1
            direction["latency_nanoseconds_maximum"] = max(direction["latency_nanoseconds_maximum"], elapsed)
        finally:
            counters["in_flight"] -= 1

    def _cut(self, request: PortableRequest, write: bool, offset: int, memory: Memory) -> Any:
        at = 0
        while at < memory.nbytes:
            path, place, room = self._place(offset + at)
            size = min(room, self._block_bytes, memory.nbytes - at)
            yield _Block(request, write, path, place, Memory(memory.address + at, size, None))
            at += size

    def _place(self, offset: int) -> tuple[int, int, int]:
        """(path, offset in its file, bytes to the end of the unit), as StripeMap::place in store.cpp."""
        if len(self._pattern) == 1:
            return self._pattern[0], offset, 1 << 62
        unit, within = divmod(offset, self._unit_bytes)
        period, index = divmod(unit, len(self._pattern))
        path = self._pattern[index]
        unit_of_path = period * self._pattern.count(path) + self._pattern[:index].count(path)
        return path, unit_of_path * self._unit_bytes + within, self._unit_bytes - within


class _Block:
    __slots__ = ("memory", "offset", "path", "request", "write")

    def __init__(self, request: PortableRequest, write: bool, path: int, offset: int, memory: Memory) -> None:
        self.request = request
        self.write = write
        self.path = path
        self.offset = offset
        self.memory = memory


def _new_counters() -> dict[str, Any]:
    def direction() -> dict[str, Any]:
        names = ("bytes", "blocks", "retries", "failures", "bounced_bytes", "registered_blocks")
        return {
            **dict.fromkeys(names, 0),
            "latency_nanoseconds": Counter(),
            "latency_nanoseconds_maximum": 0,
        }

    return {"read": direction(), "write": direction(), "depth": Counter(), "in_flight": 0}


async def _reopen(fd: int) -> Any:
    """A handle with a position of its own on an open file, which may have no name."""
    writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    return await aiofiles.open(f"/proc/self/fd/{fd}", "r+b" if writable else "rb", buffering=0)

"""Open files, a backend's store on them, and the life of both. Slab and File are built on it; policy is theirs."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  registers its exit handler first, so that it runs after the one below
import errno
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from zero_nvme.buffers import Memory
from zero_nvme.errors import ForkedError, NvmeError
from zero_nvme.extension import native
from zero_nvme.filesystem import OpenPath
from zero_nvme.options import Options
from zero_nvme.ticket import Failure, Ticket

_live: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """Owns the descriptors in `paths`, and the threads that move bytes to and from them.

    `pattern`: one period of the striping, indices of paths. `finish`: called by close() when all is settled, before the
    descriptors go; and at interpreter exit what is queued is then moved, not dropped. Raises OSError naming the call
    that the kernel refused.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[OpenPath],
        options: Options,
        *,
        backend: str,
        pattern: Sequence[int] = (0,),
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.paths = tuple(paths)
        self.backend = backend
        self.options = options
        self.finish = finish
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._registered: dict[str, Any] = {"buffers": 0, "bytes": 0, "reason": "none was asked for"}
        self._final_stats: list[dict[str, Any]] = []
        self._store = _make_store(self.paths, options, backend, pattern)
        _live.add(self)

    def submit(self, write: bool, offset: int, memory: Memory, check: Callable[[], None] | None = None) -> Ticket:
        """Starts a request. The caller has called check_usable()."""
        request = self._store.submit(write, offset, memory.address, memory.nbytes, memory.keep)
        return Ticket(request, self, memory.nbytes, check)

    def check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedError(self.name, self._process)

    def check_usable(self) -> None:
        self.check_process()
        if self._closed:
            raise ValueError(f"{self.name} is closed")

    def describe(self) -> str:
        return self.name

    def error_of(self, failure: Failure) -> NvmeError:
        code, index, offset, wanted, got = failure
        path = self.paths[index].label
        what = "the file ends early" if code == errno.ENODATA else os.strerror(code)
        return NvmeError(
            code,
            f"{path}: {what}, at offset {offset}: wanted {wanted} bytes, got {got} ({self.backend})",
            path=path,
            offset=offset,
            wanted=wanted,
            got=got,
        )

    def drain(self, timeout: float | None = None) -> None:
        """Waits until every request is complete. Raises no request's error; TimeoutError."""
        self.check_usable()
        if not self._store.drain(timeout):
            raise TimeoutError(f"{self.name}: {self._store.pending()} requests are not complete after {timeout} s")

    def cancel(self) -> None:
        """Drops what has not started of every request, then waits for the rest."""
        self.check_usable()
        self._store.cancel()
        self._store.drain(None)

    def register(self, memory: Memory) -> bool:
        self.check_usable()
        error: int = self._store.register_buffer(memory.address, memory.nbytes, memory.keep)
        if error == 0:
            self._registered["buffers"] += 1
            self._registered["bytes"] += memory.nbytes
            self._registered["reason"] = ""
        else:
            self._registered["reason"] = f"io_uring_register: {errno.errorcode.get(-error, error)}"
        return error == 0

    def statistics(self) -> list[dict[str, Any]]:
        return self._final_stats if self._closed else self._store.statistics()

    @property
    def registered(self) -> dict[str, Any]:
        return dict(self._registered)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Waits for what was submitted, stops the threads, closes the descriptors. Twice is fine; in a child too."""
        if os.getpid() != self._process:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True  # nothing more comes in
            try:
                self._store.drain(None)
            except BaseException:  # Ctrl-C: what is in flight still is, and close() may be called again
                self._closed = False
                raise
            self._final_stats = self._store.statistics()
            self._store.close()
            try:
                if self.finish is not None:
                    self.finish()
            finally:
                for path in self.paths:
                    os.close(path.fd)

    def abandon(self) -> None:
        """In a forked child: give back the child's copies of the descriptors, touch nothing else."""
        if self._closed:
            return
        self._closed = True
        self._store.abandon()
        for path in self.paths:
            os.close(path.fd)

    def __del__(self) -> None:
        if hasattr(self, "_store"):
            self.close()


def _make_store(paths: Sequence[OpenPath], options: Options, backend: str, pattern: Sequence[int]) -> Any:
    files = [(path.fd, path.direct, path.alignment, path.memory_alignment) for path in paths]
    if backend == "aiofiles":
        from zero_nvme.portable import PortableStore

        store: Any = PortableStore
    elif native is None:
        raise OSError(errno.ENOSYS, "zero_nvme._native: the extension is not built")
    else:
        store = native.Store
    return store(
        files=files,
        pattern=list(pattern),
        unit_bytes=options.block_bytes,
        backend=backend,
        block_bytes=options.block_bytes,
        inflight_bytes=options.inflight_bytes,
        depth=options.depth,
        threads=options.threads,
        max_requests=options.max_requests,
    )


def _at_exit() -> None:
    for engine in list(_live):
        if engine.closed or os.getpid() != engine._process:
            continue
        if engine.finish is None:
            engine._store.cancel()
        engine.close()


def _after_fork() -> None:
    for engine in list(_live):
        engine.abandon()


# Before atexit's own: by then Python's executors, which aiofiles needs, refuse to work.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
os.register_at_fork(after_in_child=_after_fork)

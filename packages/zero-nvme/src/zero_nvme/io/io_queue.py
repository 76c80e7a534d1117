"""Owns open files and the threads that read and write them, for Slab and File, and the options that these share.

Finds a backend that works on a path, by writing and reading with each in turn.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  registers its exit handler first, so that it runs after the one below
import contextlib
import errno
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from zero_nvme.buffers import Memory, as_memory, empty
from zero_nvme.errors import BackendUnavailable, ForkedError, NvmeError, way_out
from zero_nvme.extension import native
from zero_nvme.files.filesystem import OpenPath, close_all, open_all, size_of
from zero_nvme.io.ticket import Ticket

if TYPE_CHECKING:
    from zero_nvme._native import Failure

_live: weakref.WeakSet[IOQueue] = weakref.WeakSet()
_stuck: list[Any] = []  # stores of queues that were forgotten while the kernel used the memory of their requests
Q = TypeVar("Q", bound="IOQueue")

BACKENDS = (*(native.backends() if native is not None else ()), "aiofiles")  # as "auto" tries them
PROBE_BYTES = 64 << 10
STALL_SECONDS = 300.0  # without a byte moved
COUNTED = ("bytes", "blocks", "retries", "failures", "bounced_bytes")


@dataclass(frozen=True)
class Options:
    """Each field is a keyword of Slab and File. `python -m zero_nvme tune PATH` measures good values."""

    backend: str = "auto"
    """`auto`, or one of BACKENDS. Raises BackendUnavailable if the named one does not work here."""
    direct: bool | None = None
    """True: use O_DIRECT or fail. False: use the page cache. None: use O_DIRECT if the filesystem supports it."""
    block_bytes: int = 4 << 20
    """The size that requests are cut into, and the unit of striping. A multiple of 4096."""
    inflight_bytes: int = 16 << 20
    """The most bytes in flight at a time on each path. One block is always allowed."""
    depth: int = 256
    """The most blocks in flight at a time on each path."""
    threads: int = 8
    """The threads of each path, for the backends `threads` and `aiofiles`."""
    max_requests: int = 65536
    """The most requests that may be incomplete. The next read or write waits until one of them completes."""

    def __post_init__(self) -> None:
        unknown = self.backend not in ("auto", *BACKENDS)
        if unknown and native is not None:  # else the probe says that the extension, which knows the names, is missing
            raise ValueError(f"backend={self.backend!r} does not exist; choose auto or one of {', '.join(BACKENDS)}")
        if self.block_bytes <= 0 or self.block_bytes % 4096 or self.block_bytes > 1 << 30:
            raise ValueError(f"block_bytes={self.block_bytes} must be a multiple of 4096, from 4096 to 1 GiB")
        for name in ("inflight_bytes", "depth", "threads", "max_requests"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if self.depth > 4096:
            raise ValueError(f"depth={self.depth} must be at most 4096")


class IOQueue:
    """Reads and writes one or several files. Base class of Slab and File, which give the bytes a meaning.

    All methods may be called from any thread. In a forked child all of them raise ForkedError, except close().
    """

    backend: str
    """The backend in use, one of BACKENDS."""
    reason: str
    """Why that backend was chosen: which ones failed before it, or what it was tried with."""
    direct: bool
    """True if I/O goes to the device with O_DIRECT, False if it goes through the page cache."""
    options: Options
    _finishes_at_exit = False  # at interpreter exit queued requests are dropped; True: they are completed

    def __init__(
        self, label: str, paths: Sequence[OpenPath], options: Options, reason: str = "", pattern: Sequence[int] = (0,)
    ) -> None:
        """Takes over the descriptors in `paths`, and closes them if it fails.

        `label` is how errors name the queue, `options` names a backend that was probed, and `pattern` is one period of
        the striping, as indices of paths. Raises BackendUnavailable if the kernel refuses a system call.
        """
        self.options, self.backend, self.direct, self.reason = options, options.backend, bool(options.direct), reason
        self._label = label
        self._paths = tuple(paths)
        self._process = os.getpid()
        self._close_lock = threading.Lock()
        self._closed = False
        self._final_stats: list[dict[str, Any]] = []
        try:
            self._store = _make_store(self._paths, options, pattern)
        except BaseException as error:
            close_all(self._paths)
            raise BackendUnavailable.of(label, error) if isinstance(error, OSError) else error from None
        _live.add(self)

    def drain(self, timeout: float | None = None) -> None:
        """Waits until every request is complete. Raises TimeoutError, but never the error of a request."""
        self._check_usable()
        if not self._store.drain(timeout):
            raise TimeoutError(f"{self._label}: {self._store.pending()} requests are not complete after {timeout} s")

    def cancel(self) -> None:
        """Drops the parts of all requests that have not started and waits for the rest. The queue stays usable.

        Raises TimeoutError where no byte of them moves for 300 s.
        """
        self._check_usable()
        self._store.cancel()
        self._settle("cancel()")

    def stats(self) -> dict[str, Any]:
        """Returns the counters since opening, also after close().

        `read` and `write` have `bytes`, `blocks`, `retries` (short or interrupted transfers that were resumed),
        `failures` and `bounced_bytes` (copied because of alignment). `registered_file` says whether the kernel looks
        the file up once instead of at every request. `paths` has the bytes that were read and written on each path.
        """
        found = self._final_stats if self._closed else self._store.statistics()
        moved = [
            (path.label, each["read"]["bytes"], each["write"]["bytes"])
            for path, each in zip(self._paths, found, strict=True)
        ]
        return {
            "backend": self.backend,
            "reason": self.reason,
            "direct": self.direct,
            **{kind: {name: sum(each[kind][name] for each in found) for name in COUNTED} for kind in ("read", "write")},
            "registered_file": all(each["registered_file"] for each in found),
            "paths": [{"path": label, "read_bytes": read, "write_bytes": written} for label, read, written in moved],
        }

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Waits for the requests in flight and closes the files. A slab without a name frees its disk space. Nothing is
        synced.

        Calling it again does no harm, and completes a close() that Ctrl-C interrupted. A forked child may call it too.
        Raises TimeoutError where no byte of the requests moves for 300 s; then nothing is closed.
        """
        if os.getpid() != self._process:
            return
        with self._close_lock:
            if self._closed:
                return
            self._closed = True  # refuses new requests
            try:
                self._settle("close()")
            except BaseException:  # the requests are still in flight, and close() may be called again
                self._closed = False
                raise
            self._final_stats = self._store.statistics()
            try:
                self._store.close()
                self._finish()
            finally:
                close_all(self._paths)

    def __enter__(self: Q) -> Q:
        return self

    def __exit__(self, *exception: object) -> Literal[False]:
        self.close()
        return False

    def __del__(self) -> None:
        if hasattr(self, "_store"):
            try:
                self.close()
            except TimeoutError:
                _stuck.append(self._store)
                raise

    # -- for the rest of the package

    def _start(self, write: bool, offset: int, memory: Memory, check: Callable[[], None] | None = None) -> Ticket:
        """Starts a request. The caller has called _check_usable()."""
        request = self._store.submit(write, offset, memory.address, memory.nbytes, memory.keep)
        return Ticket(request, self, memory.nbytes, check)

    def _settle(self, call: str) -> None:
        """Waits until no request is in flight, for as long as bytes of them move."""
        left = self._left()
        while not self._store.drain(STALL_SECONDS):
            before, left = left, self._left()
            if left == before:
                raise TimeoutError(
                    f"{self._label}: {left[0]} requests are in flight, and no byte of them has moved for "
                    f"{STALL_SECONDS:.0f} s. Call {call} again when the device answers, or end the process"
                )

    def _left(self) -> tuple[int, list[tuple[int, int]]]:
        """Returns the number of incomplete requests and the bytes of each path so far. Progress changes one of them."""
        moved = [(path["read"]["bytes"], path["write"]["bytes"]) for path in self._store.statistics()]
        return self._store.pending(), moved

    def _finish(self) -> None:
        """Called by close() when every request is complete, before the descriptors are closed."""

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ForkedError(self._label, self._process)

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise ValueError(f"{self._label} is closed")

    def _error_of(self, failure: Failure) -> NvmeError:
        code, index, offset, wanted, got = failure
        path = self._paths[index].label
        what = "the file ends early" if code == errno.ENODATA else os.strerror(code)
        text = f"{path}: {what}, at offset {offset}: wanted {wanted} bytes, got {got} ({self.backend})"
        return NvmeError(code, text + way_out(code, path), path=path, offset=offset, wanted=wanted, got=got)

    def _close_at_exit(self) -> None:
        if self._closed or os.getpid() != self._process:
            return
        if not self._finishes_at_exit:
            self._store.cancel()
        self.close()

    def _close_in_child(self) -> None:
        """Closes a forked child's copies of the descriptors and touches nothing else."""
        if not self._closed:
            self._closed = True
            self._store.abandon()
            close_all(self._paths)


def _make_store(paths: Sequence[OpenPath], options: Options, pattern: Sequence[int]) -> Any:
    if options.backend == "aiofiles":
        from zero_nvme.io.aiofiles_backend import PortableStore

        store: Any = PortableStore
    elif native is None:
        raise OSError(errno.ENOSYS, "zero_nvme._native: the extension is not built")
    else:
        store = native.Store
    files = [(path.fd, path.direct, path.alignment, path.memory_alignment) for path in paths]
    limits = asdict(options)
    del limits["direct"]  # each file has its own
    return store(files=files, pattern=list(pattern), **limits)


def choose(targets: Sequence[str], options: Options, *, reading: bool = False) -> tuple[Options, str]:
    """Returns the options with a backend that works for all targets, with O_DIRECT if possible, and the reason.

    The targets are folders: a block is written and read back in each. With `reading` they are files: the first block of
    each is read. The reason names the backends that failed before (`io_uring_setup: EPERM`), or the test that passed.

    Raises BackendUnavailable if nothing works that `options` allow, and NvmeError if no file can be created in a folder
    or the folder is full.
    """
    failures: list[str] = []
    if native is None and options.backend == "auto":
        failures.append("zero_nvme._native: ENOSYS")
    for direct in (True, False) if options.direct is None else (options.direct,):
        for backend in BACKENDS if options.backend == "auto" else (options.backend,):
            if direct and backend == "aiofiles":
                continue  # it cannot align its buffers
            chosen = replace(options, backend=backend, direct=direct)
            failure = attempt(targets, chosen, reading=reading)
            if failure is None:
                how = "with O_DIRECT" if direct else "through the page cache"
                did = "read the first block" if reading else f"wrote {PROBE_BYTES >> 10} KiB and read them back"
                return chosen, "; ".join(dict.fromkeys(failures)) or f"{backend} {did} {how}"
            failures.append(failure)
            if failure.startswith("open O_DIRECT"):
                break
    if not failures:
        failures.append("aiofiles cannot do O_DIRECT; leave direct out")
    free = options.backend == "auto" and options.direct is None
    raise BackendUnavailable(
        errno.EOPNOTSUPP,
        f"backend={options.backend} does not work on {', '.join(targets)}: {'; '.join(dict.fromkeys(failures))}; "
        + ("name another path" if free else "leave backend and direct out to take what works"),
        path=targets[0],
    )


def attempt(targets: Sequence[str], options: Options, *, reading: bool = False) -> str | None:
    """Returns None if the backend in `options` moved a block for each target, else the reason in a few words."""
    direct = bool(options.direct)
    try:
        paths = open_all(targets, direct=direct, reading=reading)
    except NvmeError as error:
        if direct and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return f"open O_DIRECT in {error.path}: {errno.errorcode[error.errno]}"
        raise
    least = min(PROBE_BYTES, *(size_of(path.fd) for path in paths)) if reading else PROBE_BYTES
    small = replace(options, block_bytes=max(4096, least // 4096 * 4096), max_requests=16)
    nbytes = len(paths) * min(least, small.block_bytes)
    try:
        with IOQueue("probe", paths, small, pattern=range(len(paths))) as queue:
            return _round_trip(queue, nbytes, reading=reading)
    except BackendUnavailable as error:
        return error.refusal


def _round_trip(queue: IOQueue, nbytes: int, *, reading: bool) -> str | None:
    pattern, back = empty(nbytes), empty(nbytes)
    pattern[:] = (os.urandom(251) * (nbytes // 251 + 1))[:nbytes]
    try:
        if not reading:
            queue._start(True, 0, as_memory(pattern, writable=False)).wait()
        queue._start(False, 0, as_memory(back, writable=True)).wait()
    except NvmeError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) and not reading:
            raise
        return f"{queue.backend}: {errno.errorcode.get(error.errno or 0, error.errno)} on the first block"
    if bytes(back) != bytes(pattern) and not reading:
        return f"{queue.backend}: the bytes that it read differ from those that it wrote"
    return None


def _at_exit() -> None:
    with contextlib.ExitStack() as all_of_them:  # also where one raises
        for queue in list(_live):
            all_of_them.callback(queue._close_at_exit)


def _after_fork() -> None:
    for queue in list(_live):
        queue._close_in_child()


# Before atexit's own: by then Python's executors, which aiofiles needs, refuse to work.
getattr(threading, "_register_atexit", atexit.register)(_at_exit)
os.register_at_fork(after_in_child=_after_fork)

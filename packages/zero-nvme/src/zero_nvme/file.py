"""A named, durable file with the slab's machinery: the same tickets, by offset, and sync()."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zero_nvme import probe
from zero_nvme.buffers import as_memory
from zero_nvme.engine import Engine
from zero_nvme.errors import NvmeError, unavailable
from zero_nvme.filesystem import DEFAULT_ALIGNMENT, open_path, preallocate, size_of
from zero_nvme.options import Options
from zero_nvme.store import Store
from zero_nvme.ticket import Ticket

_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}


class File(Store):
    """A file, or a block device.

    `mode`: `r` reads; `r+` also writes; `w` creates or empties, reads and writes; `x` creates what must not exist.

    Written bytes are on the device once sync() has returned, and survive kill -9 and a power cut from then on. A
    process killed before that may leave up to one page of zeros behind the last byte written.
    The keywords are fields of `Options`. Raises NvmeError naming the path, BackendUnavailable, ValueError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "r",
        backend: str = "auto",
        *,
        direct: bool | None = None,
        block_bytes: int = Options.block_bytes,
        inflight_bytes: int = Options.inflight_bytes,
        depth: int = Options.depth,
        threads: int = Options.threads,
        max_requests: int = Options.max_requests,
    ) -> None:
        if mode not in _FLAGS:
            raise ValueError(f"mode={mode!r} does not exist; choose one of {', '.join(_FLAGS)}")
        asked = Options(backend, direct, block_bytes, inflight_bytes, depth, threads, max_requests)
        self.name = os.fspath(path)
        self.mode = mode
        self._folder = os.path.dirname(os.path.abspath(self.name))
        if not mode.startswith(("w", "x")) and not os.path.exists(self.name):
            raise NvmeError(errno.ENOENT, f"{self.name} does not exist; mode 'w' creates it", path=self.name)
        if mode == "r" or stat.S_ISBLK(_mode_of(self.name)):
            choice = probe.choose([self.name], asked, reading=True)
        else:
            choice = probe.choose([self._folder], asked)
        self.backend, self.reason, self.direct = choice.backend, choice.reason, choice.direct
        self.options = replace(asked, backend=choice.backend, direct=choice.direct)
        opened = open_path(self.name, _FLAGS[mode], 0o666, direct=self.direct, label=self.name)
        self.alignment = max(DEFAULT_ALIGNMENT, opened.alignment)
        self._end = _End(self.name, opened.fd, writable=mode != "r")
        try:
            self._engine = Engine(
                f"File({self.name})", [opened], self.options, backend=self.backend, finish=self._end.trim
            )
        except OSError as error:
            os.close(opened.fd)
            raise unavailable(self.name, error) from None
        if mode in ("w", "x"):
            _sync_folder(self._folder)

    @property
    def size(self) -> int:
        """Bytes up to the last one written, writes in flight included."""
        self._engine.check_usable()
        return self._end.bytes if self.mode != "r" else size_of(self._engine.paths[0].fd)

    def read(self, buffer: Any, offset: int = 0) -> Ticket:
        """Starts reading bytes [offset, offset + size of buffer) of the file.

        Raises TypeError for a buffer that cannot be written to, ValueError for a negative offset, NvmeError ENODATA
        for a range that ends after the file; where the file is cut short later, the ticket does.
        """
        self._engine.check_usable()
        memory = as_memory(buffer, writable=True)
        _check_offset(offset)
        size = self.size
        if offset + memory.nbytes > size:
            raise NvmeError(
                errno.ENODATA,
                f"{self.name} has {size} bytes; {memory.nbytes} at offset {offset} were wanted",
                path=self.name,
                offset=offset,
                wanted=memory.nbytes,
                got=max(0, size - offset),
            )
        return self._engine.submit(False, offset, memory)

    def write(self, buffer: Any, offset: int = 0) -> Ticket:
        """Starts writing `buffer` to bytes [offset, offset + its size); the file grows as needed."""
        self._engine.check_usable()
        if self.mode == "r":
            raise ValueError(f"{self.name} was opened with mode 'r'; open it with 'r+' to write")
        memory = as_memory(buffer, writable=False)
        _check_offset(offset)
        self._end.raise_to(offset + memory.nbytes)
        return self._engine.submit(True, offset, memory)

    def reserve(self, nbytes: int) -> None:
        """Allocates blocks for the first `nbytes` bytes, now. sync() and close() give back what was not written.

        Raises NvmeError ENOSPC with the bytes wanted and free.
        """
        self._engine.check_usable()
        preallocate(self._engine.paths[0], nbytes)

    def sync(self) -> None:
        """Waits for all writes, cuts padding off, and has the device write what it caches. Raises NvmeError.

        Errors of single requests are their tickets' to raise.
        """
        self._engine.drain()
        self._end.trim()
        if self.mode != "r":
            _checked(self.name, os.fsync, self._engine.paths[0].fd)

    def __repr__(self) -> str:
        return f"<{self._engine.name}, mode {self.mode}, {self.backend}{', closed' if self.closed else ''}>"


class _End:
    """The logical end of an open file. The engine trims the file to it when it closes, at interpreter exit too."""

    def __init__(self, name: str, fd: int, *, writable: bool) -> None:
        self.bytes = size_of(fd)
        self._name = name
        self._fd = fd
        self._trimmed = writable and stat.S_ISREG(os.fstat(fd).st_mode)
        self._lock = threading.Lock()

    def raise_to(self, end: int) -> None:
        with self._lock:
            self.bytes = max(self.bytes, end)

    def trim(self) -> None:
        """Cuts off what direct I/O padded and what reserve() allocated in vain."""
        if self._trimmed and os.fstat(self._fd).st_size > self.bytes:
            _checked(self._name, os.ftruncate, self._fd, self.bytes)


def _checked(name: str, call: Callable[..., object], *arguments: int) -> None:
    try:
        call(*arguments)
    except OSError as error:
        code = error.errno or errno.EIO
        raise NvmeError(code, f"{call.__name__} {name}: {os.strerror(code)}", path=name) from None


def _check_offset(offset: int) -> None:
    if offset < 0:
        raise ValueError(f"offset={offset} cannot be negative")


def _mode_of(name: str) -> int:
    return os.stat(name).st_mode if os.path.exists(name) else 0


def _sync_folder(folder: str) -> None:
    """Makes a new name durable. A filesystem that cannot sync a folder does not need it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)

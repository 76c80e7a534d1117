"""Reads and writes a named, durable file by offset, with the same tickets as a slab, and sync()."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from typing import Any

from zero_nvme.buffers import as_memory
from zero_nvme.errors import NvmeError, refused
from zero_nvme.files.filesystem import DEFAULT_ALIGNMENT, open_path, reserve, size_of, sync_folder
from zero_nvme.io.io_queue import IOQueue, Options, choose
from zero_nvme.io.ticket import Ticket

_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}


class File(IOQueue):
    """A file or a block device.

    `mode` is `r` to read, `r+` to read and write, `w` to create or empty the file first, or `x` to create a file that
    must not exist yet. The keywords are fields of `Options`.

    Once sync() has returned, the bytes written before it survive kill -9 and a power cut. A process that is killed
    earlier may leave up to one page of zeros after the last byte written.
    Raises NvmeError with the path, BackendUnavailable, ValueError.

    Examples:
        >>> import zero_nvme
        >>> with zero_nvme.File("numbers.bin", "w") as file:
        ...     zero_nvme.wait_all([file.write(bytes([n]) * 4, offset=4 * n) for n in range(3)])
        ...     file.sync()
        >>> back = bytearray(6)
        >>> with zero_nvme.File("numbers.bin") as file:
        ...     file.read(back, offset=2).wait()
        >>> back.hex(" ")
        '00 00 01 01 01 01'
    """

    _finishes_at_exit = True

    def __init__(self, path: str | os.PathLike[str], mode: str = "r", backend: str = "auto", **options: Any) -> None:
        if mode not in _FLAGS:
            raise ValueError(f"mode={mode!r} does not exist; choose one of {', '.join(_FLAGS)}")
        asked = Options(backend, **options)
        self.name = os.fspath(path)
        self.mode = mode
        folder = os.path.dirname(os.path.abspath(self.name))
        exists = os.path.exists(self.name)
        if not mode.startswith(("w", "x")) and not exists:
            raise NvmeError(errno.ENOENT, f"{self.name} does not exist; mode 'w' creates it", path=self.name)
        reading = mode == "r" or (exists and stat.S_ISBLK(os.stat(self.name).st_mode))
        chosen, reason = choose([self.name if reading else folder], asked, reading=reading)
        opened = open_path(self.name, _FLAGS[mode], 0o666, direct=bool(chosen.direct), label=self.name)
        self.alignment = max(DEFAULT_ALIGNMENT, opened.alignment)
        self._fd = opened.fd
        self._end, self._end_lock = size_of(opened.fd), threading.Lock()  # bytes; without the padding of direct I/O
        self._trims = mode != "r" and stat.S_ISREG(os.fstat(opened.fd).st_mode)
        super().__init__(f"File({self.name})", [opened], chosen, reason)
        if mode in ("w", "x"):
            with contextlib.suppress(OSError):  # a filesystem that cannot sync a folder does not need it
                sync_folder(folder)

    @property
    def size(self) -> int:
        """The bytes up to the last one written, including writes in flight."""
        self._check_usable()
        return self._end if self.mode != "r" else size_of(self._fd)

    def read(self, buffer: Any, offset: int = 0) -> Ticket:
        """Starts reading bytes [offset, offset + size of buffer) of the file.

        Raises TypeError for a buffer that cannot be written to, ValueError for a negative offset, and NvmeError
        (ENODATA) for a range beyond the end. If the file is truncated later, waiting for the ticket raises that.
        """
        self._check_usable()
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
        return self._start(False, offset, memory)

    def write(self, buffer: Any, offset: int = 0) -> Ticket:
        """Starts writing `buffer` to bytes [offset, offset + its size). The file grows as needed."""
        self._check_usable()
        if self.mode == "r":
            raise ValueError(f"{self.name} was opened with mode 'r'; open it with 'r+' to write")
        memory = as_memory(buffer, writable=False)
        _check_offset(offset)
        with self._end_lock:
            self._end = max(self._end, offset + memory.nbytes)
        return self._start(True, offset, memory)

    def reserve(self, nbytes: int) -> None:
        """Allocates the blocks of the first `nbytes` bytes now. sync() and close() free those that were not written.

        Raises NvmeError (ENOSPC) with the bytes wanted and free.
        """
        self._check_usable()
        reserve(self._paths[0], nbytes)

    def sync(self) -> None:
        """Waits for all writes, cuts off padding and makes the device write its cache. Raises NvmeError.

        TimeoutError where no byte of them moves for 300 s. It does not raise the errors of single requests: waiting for
        their tickets does.
        """
        self._check_usable()
        self._settle("sync()")
        self._finish()
        if self.mode != "r":
            try:
                os.fsync(self._fd)
            except OSError as error:
                raise refused(f"fsync {self.name}", error, self.name) from None

    def _finish(self) -> None:
        """Cuts off the padding of direct I/O, and blocks that reserve() allocated and nobody wrote."""
        try:
            if self._trims and os.fstat(self._fd).st_size > self._end:
                os.ftruncate(self._fd, self._end)
        except OSError as error:
            raise refused(f"ftruncate {self.name}", error, self.name) from None

    def __repr__(self) -> str:
        return f"<{self._label}, mode {self.mode}, {self.backend}{', closed' if self.closed else ''}>"


def _check_offset(offset: int) -> None:
    if offset < 0:
        raise ValueError(f"offset={offset} cannot be negative")

"""Preallocates a range of bytes on one or several paths and hands it out in extents. A named one stays on disk.

Implements zero_offload's ByteStore protocol without importing it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from typing import Any

from zero_nvme.buffers import as_memory
from zero_nvme.errors import NvmeError, refused
from zero_nvme.extents import Allocator, Extent, bytes_per_path, pattern_of
from zero_nvme.files import filesystem
from zero_nvme.files.checksums import Checksums
from zero_nvme.files.named import SUFFIX, NamedFiles
from zero_nvme.io.io_queue import IOQueue, Options, choose
from zero_nvme.io.ticket import Ticket
from zero_nvme.tools.measure import measure_weights

Folder = str | os.PathLike[str]


class Slab(IOQueue):
    """Disk space that is handed out in extents.

    paths: one folder, or several that the bytes are striped over; `.paths` has them.
    capacity_bytes: reserved at once. None: reserved by reserve(), or as extents are allocated. It is not a limit, since
        a full slab grows.
    name: the bytes are in files `NAME.slab` in the folders, which stay when the slab is closed. The next slab of the
        same name and folders opens them: `.found` says whether there were any. None: files without a name, which end
        with the process.
    weights: the share of each path. None: measured, if there are several, by writing and reading 64 MiB in each.
    checksum: verifies reads of ranges that were written before, when their ticket is waited for.
    allow_memory: permits tmpfs and the like, which are refused by default because bytes written there stay in memory.
    The other keywords are fields of `Options`.

    Raises NvmeError for a folder that is missing, read-only, full or in memory, and with a name where another process
    has the slab (EBUSY) or its files do not belong together; BackendUnavailable; ValueError.

    Examples:
        >>> import zero_nvme
        >>> with zero_nvme.Slab(["."]) as slab:
        ...     extent = slab.allocate(5)
        ...     slab.write(extent, b"bytes").wait()
        ...     back = bytearray(3)
        ...     slab.read(extent, back, offset=2).wait()
        >>> bytes(back)
        b'tes'
    """

    def __init__(
        self,
        paths: Folder | Sequence[Folder],
        capacity_bytes: int | None = None,
        backend: str = "auto",
        *,
        name: str | None = None,
        weights: Sequence[float] | None = None,
        checksum: bool = False,
        allow_memory: bool = False,
        **options: Any,
    ) -> None:
        asked = Options(backend, **options)
        folders = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
        if not folders:
            raise ValueError("Slab needs at least one folder")
        if weights is not None and len(weights) != len(folders):
            raise ValueError(f"{len(weights)} weights for {len(folders)} paths; give one for each")
        for folder in () if allow_memory else folders:
            if memory := filesystem.memory_under(folder):
                raise NvmeError(
                    errno.EINVAL,
                    f"{folder} is on {memory}, which is memory, so offloading to it would free none; "
                    "name a folder on a disk, or pass allow_memory=True",
                    path=folder,
                )
        try:
            chosen, reason = choose(folders, asked)
        except NvmeError:  # of a full disk
            there = [os.path.join(folder, f"{name}{SUFFIX}") for folder in folders]
            if name is None or not all(map(os.path.exists, there)):
                raise
            chosen, reason = choose(there, asked, reading=True)  # the slab on disk needs no more room
        self.paths, self.name = tuple(folders), name
        self._lock = threading.Lock()
        self._sync_error: NvmeError | None = None
        direct, label = bool(chosen.direct), f"Slab({', '.join(folders)})" if name is None else f"Slab {name!r}"
        self._files = files = None if name is None else NamedFiles(folders, name, direct=direct)
        self.found = files is not None and files.found is not None
        opened = filesystem.open_all(folders, direct=direct) if files is None else files.paths
        try:
            self.pattern = self._striping(weights, chosen)
        except BaseException:
            filesystem.close_all(opened)
            raise
        self.alignment = max([filesystem.DEFAULT_ALIGNMENT, *(path.alignment for path in opened)])
        super().__init__(label, opened, chosen, reason, self.pattern)
        self._extents = Allocator(self.alignment)
        self._checksums = Checksums() if checksum else None
        if capacity_bytes is not None:
            try:
                self.reserve(capacity_bytes)
            except BaseException:
                self.close()
                raise

    def _striping(self, weights: Sequence[float] | None, options: Options) -> tuple[int, ...]:
        """Returns the pattern over the paths, from the files on disk if there are any, else a new one."""
        found = None if self._files is None else self._files.found
        if found is not None:
            pattern = tuple(pattern_of(weights)) if weights is not None else found.pattern
            asked, made = (pattern, options.block_bytes), (found.pattern, found.block_bytes)
            if len(self.paths) > 1 and asked != made:
                raise ValueError(
                    f"slab {self.name!r} is striped by {list(made[0])} in blocks of {made[1]} bytes, and "
                    f"{list(asked[0])} in blocks of {asked[1]} were asked for; "
                    f"leave weights= out and pass block_bytes={made[1]}"
                )
            return found.pattern
        if weights is None and len(self.paths) > 1:
            weights = measure_weights(self.paths, options)
        pattern = tuple(pattern_of(weights or [1]))
        if self._files is not None:
            self._files.describe(pattern, options.block_bytes)
        return pattern

    # -- space

    @property
    def capacity_bytes(self) -> int:
        """The bytes reserved on disk."""
        return self._extents.capacity_bytes

    def reserve(self, total_bytes: int) -> None:
        """Grows the slab to at least `total_bytes` and allocates the blocks on disk now.

        Where overwriting takes new room, for example because a snapshot shares the slab, that has to be free as well.
        Raises NvmeError (ENOSPC, with the path and the bytes wanted and free) and leaves the slab unchanged.
        """
        self._check_usable()
        with self._lock:
            self._grow(max(self.capacity_bytes, self._extents.rounded(total_bytes)), overwritten=True)

    def _grow(self, capacity_bytes: int, *, overwritten: bool = False) -> None:
        sizes = bytes_per_path(capacity_bytes, self.pattern, self.options.block_bytes, len(self._paths))
        for path, nbytes in zip(self._paths, sizes, strict=True):
            filesystem.reserve(path, nbytes, overwritten=overwritten)
        self._extents.grow(capacity_bytes)

    def allocate(self, nbytes: int) -> Extent:
        """Returns an aligned extent of `nbytes` bytes. Grows the slab if reserve() has not made enough room.

        Raises NvmeError (ENOSPC), or ValueError for a negative size.
        """
        self._check_usable()
        if nbytes < 0:
            raise ValueError(f"allocate({nbytes}): the size in bytes cannot be negative")
        with self._lock:
            if missing := self._extents.missing(nbytes):
                self._grow(self.capacity_bytes + missing)
            return self._extents.allocate(nbytes)

    def claim(self, offset_bytes: int, nbytes: int) -> Extent:
        """Allocates the extent that begins at `offset_bytes`, which an earlier process had allocated.

        Raises ValueError where a part of it is allocated already, or for an offset that no extent can have; NvmeError
        (ENODATA) where the files of the slab end before it.
        """
        self._check_usable()
        with self._lock:
            end = offset_bytes + self._extents.rounded(nbytes)
            if end > self._extents.capacity_bytes:
                sizes = bytes_per_path(end, self.pattern, self.options.block_bytes, len(self._paths))
                for path, size in zip(self._paths, sizes, strict=True):
                    if (there := filesystem.size_of(path.fd)) < size:
                        raise NvmeError(
                            errno.ENODATA,
                            f"{path.label}: slab {self.name!r} has {there} bytes there, and an extent ends at byte "
                            f"{size}: its files were cut, and the values are lost",
                            path=path.label, wanted=size, got=there,
                        )  # fmt: skip
                self._extents.grow(end)
            return self._extents.claim(offset_bytes, nbytes)

    def free(self, extent: Extent) -> None:
        """Frees the extent, whose requests the caller has waited for. Raises ValueError if it is not allocated."""
        self._check_usable()
        with self._lock:
            self._extents.free(extent)
            if self._checksums is not None:
                self._checksums.forget(extent)

    # -- bytes

    def read(self, extent: Extent, buffer: Any, offset: int = 0) -> Ticket:
        """Starts reading bytes [offset, offset + size of buffer) of the extent into `buffer`.

        Raises TypeError for a buffer that cannot be written to, ValueError for a range outside the extent.
        """
        return self._submit(False, extent, buffer, offset)

    def write(self, extent: Extent, buffer: Any, offset: int = 0) -> Ticket:
        """Starts writing `buffer` to bytes [offset, offset + its size) of the extent."""
        return self._submit(True, extent, buffer, offset)

    def _submit(self, write: bool, extent: Extent, buffer: Any, offset: int) -> Ticket:
        self._check_usable()
        memory = as_memory(buffer, writable=not write)
        if offset < 0 or offset + memory.nbytes > extent.nbytes:
            raise ValueError(f"bytes [{offset}, {offset + memory.nbytes}) are outside an extent of {extent.nbytes}")
        self._extents.check(extent)
        check = None if self._checksums is None else self._checksums.observe(write, extent, offset, memory)
        return self._start(write, extent.offset_bytes + offset, memory, check)

    # -- life of a slab with a name

    def sync(self) -> None:
        """Flushes the devices: every write whose ticket is done survives a power cut after this.

        Raises NvmeError if a device fails, and in every later call too, because it is unknown which writes survived.
        Write the same bytes to another slab then.
        """
        self._check_usable()
        if self._sync_error is not None:
            raise self._sync_error
        for path in self._paths:
            try:
                os.fdatasync(path.fd)
            except OSError as error:
                self._sync_error = refused(f"fdatasync of {self._label} in {path.label}", error, path.label)
                raise self._sync_error from None

    def unlink(self) -> None:
        """Removes the files, if the slab has a name. The slab stays usable, and their room is free once it is closed.

        Raises NvmeError.
        """
        self._check_process()
        try:
            if self._files is not None and not self.closed:  # under the lock: later the name may be another slab's
                self._files.remove()
        except OSError as error:
            raise refused(f"remove {self._label}", error, self.paths[0]) from None

    def remove(self) -> None:
        """Closes the slab and removes its files, if it has a name. Raises NvmeError."""
        try:
            self.unlink()
        finally:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.capacity_bytes} bytes"
        return f"<{self._label}, {self.backend}, {state}>"

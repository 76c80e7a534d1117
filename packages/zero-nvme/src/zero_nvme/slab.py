"""A preallocated, nameless range of bytes on one or several paths, given out in extents. Nothing of it outlives the
process. Fills zero_offload's ByteStore protocol without importing it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zero_nvme import probe, striping
from zero_nvme.buffers import as_memory, empty
from zero_nvme.checksums import Checksums
from zero_nvme.engine import Engine
from zero_nvme.errors import NvmeError, unavailable
from zero_nvme.extents import Allocator, Extent
from zero_nvme.filesystem import DEFAULT_ALIGNMENT, IN_MEMORY, OpenPath, filesystem_name, open_nameless, preallocate
from zero_nvme.options import Options
from zero_nvme.store import Store
from zero_nvme.ticket import Ticket

Folder = str | os.PathLike[str]


class Slab(Store):
    """`paths`: one folder, or several that are striped. `capacity_bytes`: reserved at once; None: by reserve(), else as
    extents are allocated. It is no limit: a slab that is full grows.

    `weights`: a share for each path; None: measured, by writing and reading 64 MiB in each, if there are several.
    `checksum`: reads of ranges written before are verified when their ticket is waited for. `first_touch`: reserve()
    also writes what it reserves once, because the first write to a block costs about twice the later ones.
    `allow_memory`: tmpfs and its like are refused otherwise, since what is written there stays in memory.
    The other keywords are fields of `Options`.

    Raises NvmeError (a folder that is missing, read-only, full or in memory), BackendUnavailable, ValueError.
    All methods may be called from any thread.
    """

    def __init__(
        self,
        paths: Folder | Sequence[Folder],
        capacity_bytes: int | None = None,
        backend: str = "auto",
        *,
        weights: Sequence[float] | None = None,
        checksum: bool = False,
        first_touch: bool = False,
        allow_memory: bool = False,
        direct: bool | None = None,
        block_bytes: int = Options.block_bytes,
        inflight_bytes: int = Options.inflight_bytes,
        depth: int = Options.depth,
        threads: int = Options.threads,
        max_requests: int = Options.max_requests,
    ) -> None:
        asked = Options(backend, direct, block_bytes, inflight_bytes, depth, threads, max_requests)
        folders = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
        if not folders:
            raise ValueError("Slab needs at least one folder")
        if weights is not None and len(weights) != len(folders):
            raise ValueError(f"{len(weights)} weights for {len(folders)} paths; give one for each")
        if not allow_memory:
            _refuse_memory(folders)
        choice = probe.choose(folders, asked)
        self.backend = choice.backend
        self.reason = choice.reason
        self.direct = choice.direct
        self.options = replace(asked, backend=choice.backend, direct=choice.direct)
        if weights is None and len(folders) > 1:
            weights = striping.measure_weights(folders, self.options, choice.backend, direct=choice.direct)
        self.pattern = tuple(striping.pattern_of(weights or [1]))
        self._first_touch = first_touch
        self._lock = threading.Lock()
        self._engine = self._open(folders)
        self.alignment = max([DEFAULT_ALIGNMENT, *(path.alignment for path in self._engine.paths)])
        self._extents = Allocator(self.alignment)
        self._checksums = Checksums() if checksum else None
        self._reserved = 0
        if capacity_bytes is not None:
            try:
                self.reserve(capacity_bytes)
            except BaseException:
                self.close()
                raise

    def _open(self, folders: Sequence[str]) -> Engine:
        opened: list[OpenPath] = []
        try:
            for folder in folders:
                opened.append(open_nameless(folder, direct=self.direct))
            name = f"Slab({', '.join(folders)})"
            return Engine(name, opened, self.options, backend=self.backend, pattern=self.pattern)
        except OSError as error:
            for path in opened:
                os.close(path.fd)
            raise error if isinstance(error, NvmeError) else unavailable(f"Slab on {folders[0]}", error) from None

    # -- space

    @property
    def capacity_bytes(self) -> int:
        """Bytes reserved on disk."""
        return self._extents.capacity_bytes

    def reserve(self, total_bytes: int) -> None:
        """Makes the slab at least `total_bytes` large, its blocks allocated on disk now.

        Raises NvmeError ENOSPC with the path and the bytes wanted and free; the slab is then as it was.
        """
        self._engine.check_usable()
        with self._lock:
            self._grow(self._extents.rounded(total_bytes))

    def _grow(self, capacity_bytes: int) -> None:
        before = self._extents.capacity_bytes
        if capacity_bytes <= before:
            return
        sizes = striping.bytes_per_path(capacity_bytes, self.pattern, self.options.block_bytes, len(self._engine.paths))
        for path, nbytes in zip(self._engine.paths, sizes, strict=True):
            preallocate(path, nbytes)
        if self._first_touch:
            self._write_zeros(before, capacity_bytes)
        self._extents.grow(capacity_bytes)

    def _write_zeros(self, start: int, stop: int) -> None:
        zeros = empty(min(64 << 20, stop - start))
        for offset in range(start, stop, len(zeros) or 1):
            part = zeros[: min(len(zeros), stop - offset)]
            self._engine.submit(True, offset, as_memory(part, writable=False)).wait()

    def allocate(self, nbytes: int) -> Extent:
        """An extent of `nbytes` bytes, aligned. Grows the slab where reserve() has not made room.

        Raises NvmeError ENOSPC, ValueError for a negative size.
        """
        self._engine.check_usable()
        if nbytes < 0:
            raise ValueError(f"allocate({nbytes}): the size in bytes cannot be negative")
        with self._lock:
            if not self._extents.fits(nbytes):
                missing = self._extents.rounded(max(nbytes, 1)) - self._extents.room_at_end()
                self._grow(self._extents.capacity_bytes + missing)
            return self._extents.allocate(nbytes)

    def free(self, extent: Extent) -> None:
        """Gives the extent back. The caller has waited for its requests. Raises ValueError if it is not allocated."""
        self._engine.check_usable()
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
        self._engine.check_usable()
        memory = as_memory(buffer, writable=not write)
        if offset < 0 or offset + memory.nbytes > extent.nbytes:
            raise ValueError(
                f"bytes [{offset}, {offset + memory.nbytes}) are outside an extent of {extent.nbytes} bytes"
            )
        self._extents.check(extent)
        check = None if self._checksums is None else self._checksums.observe(write, extent, offset, memory)
        return self._engine.submit(write, extent.offset_bytes + offset, memory, check)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.capacity_bytes} bytes"
        return f"<{self._engine.name}, {self.backend}, {state}>"


def _refuse_memory(folders: Sequence[str]) -> None:
    for folder in folders:
        name = filesystem_name(folder)
        if name in IN_MEMORY:
            raise NvmeError(
                errno.EINVAL,
                f"{folder} is on {name}, which is memory: what is offloaded there is not offloaded; "
                "name a folder on a disk, or pass allow_memory=True",
                path=folder,
            )

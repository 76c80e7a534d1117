"""Finds a backend that works on a path, by writing and reading with each in turn. Keeps nothing open."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace

from zero_nvme.buffers import as_memory, empty
from zero_nvme.errors import BackendUnavailable, NvmeError
from zero_nvme.extension import native
from zero_nvme.filesystem import open_folders, open_path, size_of
from zero_nvme.io_queue import IOQueue
from zero_nvme.options import BACKENDS, Options

PROBE_BYTES = 64 << 10


def choose(targets: Sequence[str], options: Options, *, reading: bool = False) -> tuple[Options, str]:
    """Returns the options with a backend that works for all targets, with O_DIRECT if possible, and the reason.

    The targets are folders, in each of which a block is written and read back. With `reading` there is one target, a
    file, of which only the first block is read. The reason names what failed before (`io_uring_setup: EPERM`), or says
    what was tried.

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
    raise BackendUnavailable(
        errno.EOPNOTSUPP,
        f"backend={options.backend} does not work on {', '.join(targets)}: {'; '.join(dict.fromkeys(failures))}; "
        "leave backend and direct out to take what works",
        path=targets[0],
    )


def attempt(targets: Sequence[str], options: Options, *, reading: bool = False) -> str | None:
    """Returns None if the backend in `options` moved a block for each target, else the reason in a few words."""
    direct = bool(options.direct)
    try:
        if reading:
            paths = [open_path(targets[0], os.O_RDONLY, 0, direct=direct, label=targets[0])]
        else:
            paths = open_folders(targets, direct=direct)
    except NvmeError as error:
        if direct and error.errno == errno.EINVAL:
            return f"open O_DIRECT in {error.path}: EINVAL"
        raise
    nbytes = min(PROBE_BYTES, size_of(paths[0].fd)) if reading else len(paths) * PROBE_BYTES
    small = replace(options, block_bytes=PROBE_BYTES, max_requests=16)
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
        if error.errno == errno.ENOSPC and not reading:
            raise
        return f"{queue.backend}: {errno.errorcode.get(error.errno or 0, error.errno)} on the first block"
    if bytes(back) != bytes(pattern) and not reading:
        return f"{queue.backend}: what it read is not what it wrote"
    return None

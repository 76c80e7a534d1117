"""Finds a backend that works on a path, by writing and reading with each in turn. Keeps nothing open."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace

from zero_nvme.buffers import as_memory, empty
from zero_nvme.errors import BackendUnavailable, NvmeError
from zero_nvme.extension import native
from zero_nvme.files.filesystem import open_all, size_of
from zero_nvme.io.io_queue import BACKENDS, IOQueue, Options

PROBE_BYTES = 64 << 10


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
        return f"{queue.backend}: what it read is not what it wrote"
    return None

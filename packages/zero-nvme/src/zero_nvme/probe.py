"""Which backend works on these folders: found by writing and reading, not by asking. Keeps nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero_nvme.buffers import as_memory, empty
from zero_nvme.engine import Engine
from zero_nvme.errors import BackendUnavailable, NvmeError, describe
from zero_nvme.filesystem import OpenPath, open_nameless
from zero_nvme.options import BACKENDS, Options
from zero_nvme.ticket import wait_all

PROBE_BYTES = 64 << 10


@dataclass(frozen=True)
class Choice:
    backend: str
    direct: bool
    reason: str


def choose(folders: Sequence[str], options: Options) -> Choice:
    """The first backend that writes and reads back a block in each folder, with O_DIRECT if at all possible.

    `reason` names what failed before it (`io_uring_setup: EPERM`), or says what was tried.
    Raises BackendUnavailable when the named backend, O_DIRECT if it was demanded, or all fail; NvmeError when no file
    can be created in a folder or it is full.
    """
    failures: list[str] = []
    for direct in (True, False) if options.direct is None else (options.direct,):
        for backend in BACKENDS if options.backend == "auto" else (options.backend,):
            if direct and backend == "aiofiles":
                continue  # it has no way to align
            failure = attempt(folders, replace(options, backend=backend, direct=direct))
            if failure is None:
                how = "with O_DIRECT" if direct else "through the page cache"
                tried = f"{backend} wrote and read {PROBE_BYTES >> 10} KiB back {how}"
                return Choice(backend, direct, "; ".join(dict.fromkeys(failures)) or tried)
            failures.append(failure)
            if failure.startswith("open O_DIRECT"):
                break
    if not failures:
        failures.append("aiofiles cannot do O_DIRECT; leave direct out")
    raise BackendUnavailable(
        errno.EOPNOTSUPP,
        f"backend={options.backend} does not work on {', '.join(folders)}: {'; '.join(dict.fromkeys(failures))}; "
        "leave backend and direct out to take what works",
        path=folders[0],
    )


def attempt(folders: Sequence[str], options: Options) -> str | None:
    """None if the backend in `options` moved a block to and from each folder, else why not, in a few words."""
    paths: list[OpenPath] = []
    direct = bool(options.direct)
    try:
        for folder in folders:
            paths.append(open_nameless(folder, direct=direct))
    except NvmeError as error:
        _close(paths)
        if direct and error.errno == errno.EINVAL:
            return f"open O_DIRECT in {error.path}: EINVAL"
        raise
    small = replace(options, block_bytes=max(PROBE_BYTES, 4096), max_requests=16)
    try:
        engine = Engine("probe", paths, small, backend=options.backend, pattern=range(len(paths)))
    except OSError as error:
        _close(paths)
        return describe(error)
    try:
        return _round_trip(engine, len(paths) * PROBE_BYTES)
    finally:
        engine.close()


def _round_trip(engine: Engine, nbytes: int) -> str | None:
    pattern = empty(nbytes)
    pattern[:] = (os.urandom(251) * (nbytes // 251 + 1))[:nbytes]
    back = empty(nbytes)
    try:
        wait_all([engine.submit(True, 0, as_memory(pattern, writable=False))])
        wait_all([engine.submit(False, 0, as_memory(back, writable=True))])
    except NvmeError as error:
        if error.errno == errno.ENOSPC:
            raise
        return f"{engine.backend}: {errno.errorcode.get(error.errno or 0, error.errno)} on the first block"
    if bytes(back) != bytes(pattern):
        return f"{engine.backend}: what it read is not what it wrote"
    return None


def _close(paths: Sequence[OpenPath]) -> None:
    for path in paths:
        os.close(path.fd)

"""Which backend works on these folders: found by writing and reading, not by asking. Keeps nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zero_nvme.buffers import as_memory, empty
from zero_nvme.engine import Engine
from zero_nvme.errors import BackendUnavailable, NvmeError, describe
from zero_nvme.filesystem import OpenPath, open_nameless, open_path, size_of
from zero_nvme.options import BACKENDS, Options
from zero_nvme.ticket import wait_all

PROBE_BYTES = 64 << 10


@dataclass(frozen=True)
class Choice:
    backend: str
    direct: bool
    reason: str


def choose(targets: Sequence[str], options: Options, *, reading: bool = False) -> Choice:
    """The first backend that writes and reads back a block in each folder, with O_DIRECT if at all possible.

    `reading`: the targets are files, of which the first block is read and nothing is written.
    `reason` names what failed before it (`io_uring_setup: EPERM`), or says what was tried.
    Raises BackendUnavailable when the named backend, O_DIRECT if it was demanded, or all fail; NvmeError when no file
    can be created in a folder or it is full.
    """
    failures: list[str] = []
    for direct in (True, False) if options.direct is None else (options.direct,):
        for backend in BACKENDS if options.backend == "auto" else (options.backend,):
            if direct and backend == "aiofiles":
                continue  # it has no way to align
            failure = attempt(targets, replace(options, backend=backend, direct=direct), reading=reading)
            if failure is None:
                how = "with O_DIRECT" if direct else "through the page cache"
                did = "read the first block" if reading else f"wrote {PROBE_BYTES >> 10} KiB and read them back"
                tried = f"{backend} {did} {how}"
                return Choice(backend, direct, "; ".join(dict.fromkeys(failures)) or tried)
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
    """None if the backend in `options` moved a block for each target, else why not, in a few words."""
    paths: list[OpenPath] = []
    direct = bool(options.direct)
    try:
        for target in targets:
            paths.append(_open(target, direct=direct, reading=reading))
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
        return _read_first(engine) if reading else _round_trip(engine, len(paths) * PROBE_BYTES)
    finally:
        engine.close()


def _open(target: str, *, direct: bool, reading: bool) -> OpenPath:
    if reading:
        return open_path(target, os.O_RDONLY, 0, direct=direct, label=target)
    return open_nameless(target, direct=direct)


def _read_first(engine: Engine) -> str | None:
    nbytes = min(PROBE_BYTES, size_of(engine.paths[0].fd))
    try:
        engine.submit(False, 0, as_memory(empty(nbytes), writable=True)).wait()
    except NvmeError as error:
        return f"{engine.backend}: {errno.errorcode.get(error.errno or 0, error.errno)} on the first block"
    return None


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

"""Opens files and answers questions about them: filesystem, alignment for direct I/O, free space. Moves no data."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

from zero_nvme.errors import NvmeError, refused

DEFAULT_ALIGNMENT = 4096  # bytes; what every block device so far accepts

IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})


def filesystem_name(path: str) -> str:
    """Returns the type of the filesystem under a path, as /proc/self/mountinfo names it, or "unknown".

    Raises NvmeError if the path does not exist.
    """
    try:
        device = os.stat(path).st_dev
    except OSError as error:
        raise refused(path, error, path) from None
    number = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        names = [line.split(" - ")[1].split()[0] for line in mounts if line.split()[2] == number]
    return names[-1] if names else "unknown"


@dataclass(frozen=True)
class OpenPath:
    """An open file. `label` is the name that the user gave."""

    label: str
    fd: int
    direct: bool
    alignment: int  # bytes, of offsets and lengths; 1 without O_DIRECT
    memory_alignment: int  # bytes, of addresses


class _Statx(ctypes.Structure):
    """The result of statx(2), up to stx_dio_offset_align (Linux 6.1)."""

    _fields_ = [
        ("mask", ctypes.c_uint32),
        ("before", ctypes.c_uint8 * 148),
        ("dio_mem_align", ctypes.c_uint32),
        ("dio_offset_align", ctypes.c_uint32),
        ("after", ctypes.c_uint8 * 96),
    ]


def direct_alignment(fd: int) -> tuple[int, int]:
    """Returns the alignment in bytes that direct I/O needs of offsets (at least a page) and of memory."""
    facts = _Statx()
    statx = getattr(ctypes.CDLL(None), "statx", None)
    empty_path, dio_alignment = 0x1000, 0x2000
    if statx is None or statx(fd, b"", empty_path, dio_alignment, ctypes.byref(facts)) != 0:
        return DEFAULT_ALIGNMENT, DEFAULT_ALIGNMENT
    if not facts.mask & dio_alignment or facts.dio_offset_align == 0:
        return DEFAULT_ALIGNMENT, DEFAULT_ALIGNMENT
    return max(DEFAULT_ALIGNMENT, facts.dio_offset_align), max(512, facts.dio_mem_align)


def open_path(name: str, flags: int, mode: int, *, direct: bool, label: str) -> OpenPath:
    """Opens a file. Raises NvmeError."""
    try:
        fd = os.open(name, flags | os.O_CLOEXEC | (os.O_DIRECT if direct else 0), mode)
    except OSError as error:
        raise refused(f"open {name}", error, label) from None
    return opened(fd, label, direct=direct)


def open_folders(folders: Iterable[str], *, direct: bool) -> list[OpenPath]:
    """Opens a nameless file in every folder, or in none: those already open are closed if one fails."""
    paths: list[OpenPath] = []
    try:
        for folder in folders:
            paths.append(open_nameless(folder, direct=direct))
    except BaseException:
        close_all(paths)
        raise
    return paths


def close_all(paths: Iterable[OpenPath]) -> None:
    for path in paths:
        os.close(path.fd)


def opened(fd: int, label: str, *, direct: bool) -> OpenPath:
    offsets, addresses = direct_alignment(fd) if direct else (1, 1)
    return OpenPath(label, fd, direct, offsets, addresses)


def open_nameless(folder: str, *, direct: bool) -> OpenPath:
    """Creates a file without a name (mode 0600) in a folder. It disappears with the process, whatever ends that.

    Raises NvmeError with the folder.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            if direct:
                fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
            return opened(os.dup(file.fileno()), folder, direct=direct)
    except OSError as error:
        raise refused(f"cannot create a file in {folder}", error, folder) from None


def sync_folder(folder: str) -> None:
    """Makes new names in a folder durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def size_of(fd: int) -> int:
    """Returns the size of a file or a block device in bytes."""
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        return os.fstat(fd).st_size  # files of /proc and /sys cannot seek to their end


def free_bytes(fd: int) -> int:
    """Returns the bytes that any user may still allocate, without the blocks reserved for root."""
    facts = os.fstatvfs(fd)
    return facts.f_frsize * facts.f_bavail


def reserved_bytes(fd: int) -> int:
    """Returns the free bytes that the filesystem keeps for its administrator. `free_bytes` does not count them."""
    facts = os.fstatvfs(fd)
    return facts.f_frsize * (facts.f_bfree - facts.f_bavail)


def preallocate(path: OpenPath, nbytes: int) -> None:
    """Extends the file to `nbytes` with its blocks allocated, or leaves it unchanged.

    Raises NvmeError (ENOSPC, with the bytes wanted and free) before it writes anything.
    """
    before = os.fstat(path.fd).st_size
    wanted = nbytes - before
    if wanted <= 0:
        return
    free = free_bytes(path.fd)
    if wanted <= free:
        try:
            os.posix_fallocate(path.fd, before, wanted)
            return
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                os.ftruncate(path.fd, nbytes)  # not supported here: the writes allocate the blocks
                return
            os.ftruncate(path.fd, before)
            if error.errno != errno.ENOSPC:
                raise refused(f"fallocate in {path.label}", error, path.label) from None
    raise NvmeError(
        errno.ENOSPC,
        f"{path.label} has {free} bytes free ({free / 2**30:.2f} GiB), {wanted} are needed ({wanted / 2**30:.2f} GiB); "
        "free space there, name another path, or keep less on NVMe",
        path=path.label,
        wanted=wanted,
        got=free,
    )

"""Opens files and answers questions about them: filesystem, alignment for direct I/O, free space. Moves no data."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

from zero_nvme.errors import NvmeError, refused

DEFAULT_ALIGNMENT = 4096  # bytes; what every block device so far accepts

_MAGIC = {  # statfs(2) f_type
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x958458F6: "hugetlbfs",
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0x01021997: "9p",
    0x65735546: "fuse",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
}
IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})


def filesystem_name(path: str) -> str:
    """Returns the name of the filesystem under a path, or its magic number in hex if it is not in the table.

    Raises NvmeError if statfs(2) fails.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_long * 32)()  # struct statfs: f_type comes first
    if libc.statfs(os.fsencode(path), buffer):
        raise refused(path, OSError(ctypes.get_errno(), "statfs"), path)
    magic = buffer[0] & 0xFFFFFFFF
    return _MAGIC.get(magic, hex(magic))


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
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    try:
        return opened(os.open(folder, flags | os.O_TMPFILE, 0o600), folder, direct=direct)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT) or not os.path.isdir(folder):
            raise refused(f"cannot create a file in {folder}", error, folder) from None
    name = os.path.join(folder, f".zero_nvme-{next(tempfile._get_candidate_names())}")  # type: ignore[attr-defined]
    try:
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL and os.path.lexists(name):
            os.unlink(name)  # the kernel created it before it refused O_DIRECT
        raise refused(f"cannot create a file in {folder}", error, folder) from None
    os.unlink(name)
    return opened(fd, folder, direct=direct)


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

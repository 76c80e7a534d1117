"""Asks the kernel about a file system: memory, room, reserving, overwriting, direct I/O, syncs and locks.

Opens files. Moves no data, except zeros where a file system has no fallocate.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass

from zero_nvme.errors import NvmeError, refused

DEFAULT_ALIGNMENT = 4096  # bytes; every known block device accepts it
ZEROS_BYTES = 8 << 20  # that are written at once
PROGRESS_SECONDS = 10.0  # between two lines in the log

IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
UNSYNCED = frozenset({"volatile", "fsync=volatile", "nobarrier", "barrier=0"})  # mounted so, fsync is no promise
COPIES = frozenset({"btrfs"})  # copies data that is overwritten, except in files with chattr +C
NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM})  # EPERM: a container's filter
GET_FLAGS, SET_FLAGS, COMPRESSED, NOCOW = 0x80086601, 0x40086602, 0x4, 0x00800000  # linux/fs.h
FIEMAP, SHARED, LAST, EXTENTS = 0xC020660B, 0x2000, 0x1, 256  # linux/fiemap.h


@dataclass(frozen=True)
class Mount:
    """A mount, as /proc/self/mountinfo describes it."""

    device: str = "0:0"  # of its superblock, as in /proc/locks; stat's is another one on btrfs
    filesystem: str = "unknown"
    source: str = ""
    options: tuple[str, ...] = ()  # of its superblock


def mount_of(target: str | int) -> Mount:
    """Returns the mount that a path or an open file is on. Raises NvmeError if the path does not exist."""
    if isinstance(target, str):
        try:
            fd = os.open(target, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise refused(target, error, target) from None
        try:
            return mount_of(fd)
        finally:
            os.close(fd)
    with open(f"/proc/self/fdinfo/{target}", encoding="ascii") as facts:
        number = next((line.split()[1] for line in facts if line.startswith("mnt_id:")), "")
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            mount, _, superblock = line.partition(" - ")
            if mount.split()[0] == number:
                name, source, options = superblock.split()[:3]
                return Mount(mount.split()[2], name, source, tuple(options.split(",")))
    return Mount()


def memory_under(folder: str) -> str:
    """Returns the memory that holds a folder's bytes, such as "tmpfs" or "ext4 on zram", or "" for a disk.

    Raises NvmeError if the folder does not exist.
    """
    mount = mount_of(folder)
    if mount.filesystem in IN_MEMORY:
        return mount.filesystem
    below = ""
    with contextlib.suppress(OSError):
        device = os.stat(mount.source).st_rdev
        block = os.path.realpath(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
        below = next((kind for kind in ("zram", "ram") if f"/block/{kind}" in block), "")
    with contextlib.suppress(OSError):
        upper = next((each[9:] for each in mount.options if each.startswith("upperdir=")), "")
        below = below or (memory_under(upper) if upper else "")
    return f"{mount.filesystem} on {below}" if below else ""


@dataclass(frozen=True)
class OpenPath:
    """An open file. `label` is the name that the user gave."""

    label: str
    fd: int
    direct: bool
    alignment: int  # bytes, of offsets and lengths; 1 without O_DIRECT
    memory_alignment: int  # bytes, of addresses


def direct_alignment(fd: int) -> tuple[int, int]:
    """Returns the alignment in bytes that direct I/O needs of offsets (at least a page) and of memory.

    (0, 0): the file takes O_DIRECT and goes through the page cache all the same, as ext4 with data=journal does.
    """
    facts, statx = ctypes.create_string_buffer(256), getattr(ctypes.CDLL(None), "statx", None)
    empty_path, dio_alignment = 0x1000, 0x2000
    if statx is not None:
        statx(fd, b"", empty_path, dio_alignment, facts)  # on an error the mask stays 0
    mask, addresses, offsets = struct.unpack_from("=I148xII", facts)  # linux/stat.h
    if not mask & dio_alignment:  # before Linux 6.1
        return DEFAULT_ALIGNMENT, DEFAULT_ALIGNMENT
    return (max(DEFAULT_ALIGNMENT, offsets), max(512, addresses)) if offsets else (0, 0)


def open_path(name: str, flags: int, mode: int, *, direct: bool, label: str) -> OpenPath:
    """Opens a file. Raises NvmeError."""
    try:
        fd = os.open(name, flags | os.O_CLOEXEC, mode)
    except OSError as error:
        raise refused(f"open {name}", error, label) from None
    return opened(fd, label, direct=direct)


def open_all(targets: Iterable[str], *, direct: bool, reading: bool = False) -> list[OpenPath]:
    """Opens a nameless file in every folder, or every file for `reading`; none if one of them fails."""
    paths: list[OpenPath] = []
    try:
        for target in targets:
            read = reading and open_path(target, os.O_RDONLY, 0, direct=direct, label=target)
            paths.append(read or open_nameless(target, direct=direct))
    except BaseException:
        close_all(paths)
        raise
    return paths


def close_all(paths: Iterable[OpenPath]) -> None:
    """Closes every file. Errors of close(2) are dropped: sync() reports the writes that failed."""
    for path in paths:
        with contextlib.suppress(OSError):  # ENOTCONN of a FUSE daemon that died: the descriptor is free all the same
            os.close(path.fd)


def opened(fd: int, label: str, *, direct: bool) -> OpenPath:
    """Takes over the descriptor. `direct` adds O_DIRECT.

    By fcntl: the flag of open(2) is passed on to the program behind a FUSE mount. mergerfs and unionfs-fuse then open
    their own file with it, and write from memory that is not aligned.

    Raises NvmeError: EINVAL where the file cannot be direct, EOPNOTSUPP where it can and that has no effect.
    """
    offsets, addresses = direct_alignment(fd) if direct else (1, 1)
    try:
        if direct:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        if not offsets:
            raise OSError(errno.EOPNOTSUPP, "it goes through the page cache")
    except OSError as error:
        os.close(fd)
        raise refused(f"O_DIRECT in {label}", error, label) from None
    return OpenPath(label, fd, direct, offsets, addresses)


def open_nameless(folder: str, *, direct: bool) -> OpenPath:
    """Creates a file without a name (mode 0600) in a folder. It disappears with the process, whatever ends that.

    Raises NvmeError with the folder.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            overwrite_in_place(file.fileno())
            return opened(os.dup(file.fileno()), folder, direct=direct)
    except NvmeError:
        raise
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


def locks(fd: int) -> bool:
    """Returns whether the file can be locked (flock)."""
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


def free_bytes(target: str | int) -> int:
    """Returns the bytes that any user may still allocate, without the blocks reserved for root.

    sys.maxsize where the file system does not count them, as ramfs. Raises OSError.
    """
    facts = os.statvfs(target)
    return facts.f_frsize * facts.f_bavail if facts.f_blocks else sys.maxsize


def overwrite_in_place(fd: int) -> None:
    """Asks the file system to overwrite an empty file in place (`chattr +C` of btrfs).

    Such a file has no checksums and is not compressed. Where that cannot be asked, nothing is changed.
    """
    with contextlib.suppress(OSError):
        flags = _flags(fd) & ~COMPRESSED
        for more in (0, NOCOW):  # btrfs refuses both changes at once
            fcntl.ioctl(fd, SET_FLAGS, struct.pack("l", flags | more))


def _flags(fd: int) -> int:
    return int(struct.unpack("l", fcntl.ioctl(fd, GET_FLAGS, struct.pack("l", 0)))[0])


def copied_bytes(fd: int, nbytes: int) -> int:
    """Returns how much new room it may take to overwrite a file of `nbytes` bytes. 0: it is overwritten in place.

    btrfs frees an old extent when all of it is overwritten. A snapshot or a reflink keeps shared extents. Not counted
    are the extents of btrfs that are older than a deleted snapshot: they are copied once more, and no call tells them.
    """
    with contextlib.suppress(OSError):
        if mount_of(fd).filesystem in COPIES and not _flags(fd) & NOCOW:
            return nbytes
    found = at = 0
    while True:
        extents = bytearray(struct.pack("=QQIIII", at, 2**64 - 1 - at, 0, 0, EXTENTS, 0) + bytes(56 * EXTENTS))
        try:
            fcntl.ioctl(fd, FIEMAP, extents)
        except OSError:
            return found
        (count,) = struct.unpack_from("=I", extents, 20)
        for place in range(32, 32 + 56 * count, 56):
            start, _, length, _, _, flags = struct.unpack_from("=QQQQQI", extents, place)
            found, at = found + length * bool(flags & SHARED), start + length
        if not count or flags & LAST:
            return found


def reserve(path: OpenPath, nbytes: int, *, overwritten: bool = False) -> None:
    """Extends the file to `nbytes` with its blocks allocated, or leaves it unchanged.

    overwritten: all of it is written again and again, so the room for that has to be free too.

    Raises NvmeError (ENOSPC, with the bytes wanted and free) before it writes anything.
    """
    try:
        free, before = free_bytes(path.fd), size_of(path.fd)
        copied = copied_bytes(path.fd, max(before, nbytes)) if overwritten else 0
        if (needed := max(0, nbytes - before) + copied) <= free:
            _allocate(path, before, nbytes)
            return
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise refused(f"{path.label}: {nbytes} bytes cannot be reserved", error, path.label) from None
    why, way_out = "", "free space there, name another path, or keep less on NVMe"
    if copied:
        why = (
            f": {mount_of(path.fd).filesystem} copies {copied} of them when they are overwritten, because a snapshot "
            "or a copy shares the slab, or because it was made without `chattr +C`, as older versions made it on btrfs"
        )
        way_out = "free space there, for example by removing copies, and snapshots by `btrfs subvolume delete`"
    raise NvmeError(
        errno.ENOSPC,
        f"{path.label} has {free} bytes free ({free / 2**30:.2f} GiB), {needed} are needed ({needed / 2**30:.2f} GiB)"
        f"{why}; {way_out}",
        path=path.label,
        wanted=needed,
        got=free,
    )


def fallocate(fd: int, start: int, stop: int) -> bool:
    """Allocates bytes [start, stop) of a file. Returns False where the file system cannot. Raises OSError.

    Not by posix_fallocate: where a file system cannot, glibc's writes a byte into each page, in one call.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    while libc.fallocate(fd, 0, ctypes.c_int64(start), ctypes.c_int64(stop - start)):
        code = ctypes.get_errno()
        if code in NO_FALLOCATE:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def _allocate(path: OpenPath, start: int, stop: int) -> None:
    """Allocates bytes [start, stop) behind the end of a file, by writing zeros where there is no other way.

    Ctrl-C ends that between two blocks. If anything is raised, the file ends at `start` again. Raises OSError.
    """
    if start >= stop:
        return
    log, said = logging.getLogger(__name__), time.monotonic()
    zeros = memoryview(mmap.mmap(-1, ZEROS_BYTES))  # aligned, as O_DIRECT needs it
    at = -(-start // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT  # the block of the last byte is there
    try:
        if fallocate(path.fd, start, stop):
            return
        while at < stop:
            at += os.pwrite(path.fd, zeros[: -(-(stop - at) // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT], at)
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                log.warning("%s cannot reserve room, so zeros are written: %d of %d bytes", path.label, at, stop)
        os.ftruncate(path.fd, stop)
        os.fsync(path.fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(path.fd, start)
        raise

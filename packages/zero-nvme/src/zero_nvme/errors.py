"""Defines the package's exceptions. Each is an OSError whose text has the fact, the values and the way out."""

from __future__ import annotations

import contextlib
import errno
import os
import resource

WAYS_OUT = {
    errno.ENOSPC: "free space there, or name another path",
    errno.EDQUOT: "a disk quota is used up (`quota -s`, `btrfs qgroup show`): remove files, or have it raised",
    errno.EFBIG: "the file system has no files of that size: name another path, or several folders of it",
    **dict.fromkeys((errno.ENOTCONN, errno.ECONNABORTED), "the mount's program has ended: mount it again"),
    errno.ENOTDIR: "name the folder that it is in",
    errno.ESTALE: "a file is gone there with its name: give the slab a name=, or name another path",
    **dict.fromkeys((errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK), "the file system cannot: name another path"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "name a folder in which this user may write"),
}


class NvmeError(OSError):
    """A request or a file failed.

    `errno` says how, and `path` is the folder or file that the user named. `offset` (in that path's file), `wanted` and
    `got` are in bytes, and None where they have no meaning.
    """

    def __init__(
        self,
        code: int,
        text: str,
        *,
        path: str | None = None,
        offset: int | None = None,
        wanted: int | None = None,
        got: int | None = None,
    ) -> None:
        super().__init__(code, text)
        self.path = path
        self.offset = offset
        self.wanted = wanted
        self.got = got

    def __str__(self) -> str:
        return f"[{errno.errorcode.get(self.errno or 0, self.errno)}] {self.strerror}"


class BackendUnavailable(NvmeError):
    """The backend that was asked for does not work here. `backend="auto"` takes the best one that does.

    `refusal` names the call that failed and its errno, as in `io_uring_setup: EPERM`.
    """

    refusal: str = ""

    @classmethod
    def of(cls, what: str, error: OSError) -> BackendUnavailable:
        """The error for a backend `what` that the kernel refused with `error`."""
        call, code = str(error.strerror or error).split(":")[0], error.errno or errno.EIO
        refusal = f"{call}: {errno.errorcode.get(code, code)}"
        unavailable = cls(code, f"{what}: {refusal}; name another backend, or lower depth")
        unavailable.refusal = refusal
        return unavailable


class ChecksumError(NvmeError):
    """The bytes that were read are not the ones that were written. The text names the extent."""


class Cancelled(NvmeError):
    """The request was cancelled before all of it had started. Nothing is in flight any more."""

    def __init__(self, text: str, *, path: str | None = None) -> None:
        super().__init__(errno.ECANCELED, text, path=path)


class ForkedError(NvmeError):
    """A queue was used in a forked child. Its I/O threads are in the parent, whose files and requests are unharmed."""

    def __init__(self, what: str, opened_by: int) -> None:
        super().__init__(
            errno.EOWNERDEAD,
            f"{what} was opened by process {opened_by} and is used in its forked child {os.getpid()}; "
            "open another one here, or start children with the spawn method",
        )


def refused(what: str, error: OSError, path: str) -> NvmeError:
    """Returns the error for a system call that the kernel refused: `what`, the kernel's reason, and the way out."""
    code = error.errno or errno.EIO
    return NvmeError(code, f"{what}: {os.strerror(code)}{way_out(code, path)}", path=path)


def way_out(code: int, path: str) -> str:
    """Returns advice against an error of the kernel, with the values of `path`, to follow the error's text; or ""."""
    text, limit = WAYS_OUT.get(code, ""), resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if code == errno.EFBIG and limit != resource.RLIM_INFINITY:
        text = f"a file of this process may have {limit} bytes: start it after `ulimit -f unlimited`"
    if code == errno.ENOSPC:
        with contextlib.suppress(OSError):
            facts = os.statvfs(path)
            if facts.f_files and not facts.f_favail:
                text = f"all of its {facts.f_files} inodes are in use: remove files there, or name another path"
    return text and f"; {text}"

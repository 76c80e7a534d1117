"""What can go wrong, as exceptions: each an OSError with the fact, the values and the way out."""

from __future__ import annotations

import errno
import os


class NvmeError(OSError):
    """A request or a file failed.

    Attributes: `errno`; `path` (the directory or file named by the user); and where they apply, else None:
    `offset` (bytes, in that path's file), `wanted` and `got` (bytes).
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
    """The backend that was named does not work here. `backend="auto"` takes the best one that does."""


class ChecksumError(NvmeError):
    """What was read is not what was written; the text names the extent."""


class Cancelled(NvmeError):
    """The request was cancelled before all of it had started. Its memory is free: nothing of it is in flight."""

    def __init__(self, text: str, *, path: str | None = None) -> None:
        super().__init__(errno.ECANCELED, text, path=path)


class ForkedError(NvmeError):
    """Used in a forked child. The I/O threads stayed in the parent, whose files and requests are unharmed."""

    def __init__(self, what: str, opened_by: int) -> None:
        super().__init__(
            errno.EOWNERDEAD,
            f"{what} was opened by process {opened_by} and is used in its forked child {os.getpid()}; "
            "open another one here, or start children with the spawn method",
        )


def describe(error: OSError) -> str:
    """`io_uring_setup: EPERM`: the call that failed and errno's name."""
    call = str(error.strerror or error).split(":")[0]
    return f"{call}: {errno.errorcode.get(error.errno or 0, error.errno)}"


def unavailable(what: str, error: OSError) -> BackendUnavailable:
    """For a backend that worked when it was probed, and does not any more."""
    code = error.errno or errno.EIO
    return BackendUnavailable(code, f"{what}: {describe(error)}; name another backend, or lower depth")

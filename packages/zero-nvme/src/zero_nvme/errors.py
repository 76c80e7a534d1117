"""The package's exceptions. Each is an OSError whose text says what happened, the values, and what to do about it."""

from __future__ import annotations

import errno
import os


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
    """Returns the error for a system call that the kernel refused: `what`, then the kernel's reason."""
    code = error.errno or errno.EIO
    return NvmeError(code, f"{what}: {os.strerror(code)}", path=path)

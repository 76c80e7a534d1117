"""Opens, locks and describes the files of a slab with a name. Moves none of the slab's data.

[Note: the files of a slab with a name]
In each of its folders a slab `run` has two files:

    run.slab        the bytes; the process that has the slab open holds a lock on it (flock)
    run.slab.json   how the bytes are striped, and which process made them; written last, and as a whole

If there is an empty `run.slab` but no `run.slab.json`, a process ended while it was making the slab. It is made again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from zero_nvme.errors import NvmeError, refused
from zero_nvme.files.filesystem import OpenPath, close_all, mount_of, open_path, overwrite_in_place, sync_folder

FORMAT = 1  # of run.slab.json; a reader refuses a higher one
SUFFIX = ".slab"
ENDED_SECONDS = 30.0  # most time to wait for the lock of a process that has ended


@dataclass(frozen=True)
class Description:
    """The contents of `run.slab.json`."""

    id: str  # the same in each folder
    folder: int  # this folder's place among the paths
    folders: int
    pattern: tuple[int, ...]
    block_bytes: int
    made_by: str  # host, process and command
    format: int = FORMAT


class NamedFiles:
    """Opens and locks `name` in each of `folders`. `found`: the description on disk, or None if the slab is new."""

    def __init__(self, folders: Sequence[str], name: str, *, direct: bool) -> None:
        """Raises NvmeError: EBUSY where another process has the slab, EINVAL where folders do not belong together."""
        if not name or name != os.path.basename(name) or name.startswith("."):
            raise ValueError(f"name={name!r} must be a file name without a folder, and not begin with a dot")
        self.folders, self.name = tuple(folders), name
        if len({os.path.realpath(folder) for folder in folders}) < len(folders):
            raise ValueError(f"slab {name!r} has a folder twice in {list(folders)}; give each folder once")
        self.paths: list[OpenPath] = []
        try:
            for folder in folders:
                self.paths.append(_open_locked(folder, name, direct=direct))
            self.found = self._read()
        except BaseException:
            close_all(self.paths)
            raise

    def _read(self) -> Description | None:
        found = [description_of(folder, self.name) for folder in self.folders]
        present = [each for each in found if each is not None]
        if not present:
            if left := next((path.label for path in self.paths if os.fstat(path.fd).st_size), None):
                raise NvmeError(
                    errno.EINVAL,
                    f"{self.name}{SUFFIX} in {left} has bytes, and no {self.name}{SUFFIX}.json beside it describes it; "
                    f"bring that file too, or remove {self.name}{SUFFIX}",
                    path=left,
                )
            return None
        for folder, each in zip(self.folders, found, strict=True):
            if each is None or each.id != present[0].id:
                which = "no part of it" if each is None else f"a part of another slab of that name, {each.id}"
                raise NvmeError(
                    errno.EINVAL,
                    f"slab {self.name!r} ({present[0].id}) has {which} in {folder}; give the folders that it was made "
                    f"with, or remove {self.name}{SUFFIX}* from all of them",
                    path=folder,
                )
        places = [each.folder for each in present]
        if places != list(range(present[0].folders)):
            raise NvmeError(
                errno.EINVAL,
                f"slab {self.name!r} was made with {present[0].folders} folders, and these are number "
                f"{', '.join(str(place + 1) for place in places)} of them; give all of them, in their order",
                path=self.folders[0],
            )
        return present[0]

    def describe(self, pattern: Sequence[int], block_bytes: int) -> None:
        """Makes a new slab of the opened files, which are empty: describes them."""
        made_by = f"{socket.gethostname()}, process {os.getpid()}: {' '.join(sys.argv)[:200]}"
        first = Description(uuid.uuid4().hex, 0, len(self.folders), tuple(pattern), block_bytes, made_by)
        for place, (folder, path) in enumerate(zip(self.folders, self.paths, strict=True)):
            overwrite_in_place(path.fd)
            _write_whole(folder, f"{self.name}{SUFFIX}.json", json.dumps(asdict(replace(first, folder=place))))
        self.found = first

    def remove(self) -> None:
        """Removes the files, which stay usable until they are closed. The descriptions are removed first."""
        for folder in self.folders:
            for suffix in (f"{SUFFIX}.json", SUFFIX):  # bytes without a description count as unfinished
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, self.name + suffix))


def description_of(folder: str, name: str) -> Description | None:
    """Returns the description of a slab in a folder, or None. Raises NvmeError if it cannot be read."""
    path = os.path.join(folder, f"{name}{SUFFIX}.json")
    try:
        with open(path, encoding="utf-8") as file:
            read = json.load(file)
        if read["format"] > FORMAT:
            raise NvmeError(
                errno.EINVAL,
                f"{path} has format {read['format']}, and this zero-nvme knows up to {FORMAT}; "
                "use the version that made it, or a newer one",
                path=folder,
            )
        return Description(**read | {"pattern": tuple(read["pattern"])})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise NvmeError(
            errno.EINVAL, f"{path} does not describe a slab ({error}); remove {name}{SUFFIX}* there", path=folder
        ) from None
    except OSError as error:
        raise error if isinstance(error, NvmeError) else refused(f"open {path}", error, folder) from None


def names_in(folder: str) -> list[str]:
    """Returns the names of the slabs that have files in a folder. Raises OSError."""
    entries = os.listdir(folder)
    return sorted({entry.split(SUFFIX)[0] for entry in entries if entry.endswith((SUFFIX, SUFFIX + ".json"))})


def holder_of(folder: str, name: str) -> int | None:
    """Returns the process that has a slab open, 0 if /proc/locks does not name it, or None if no living one has.

    Raises NvmeError for a file that this user may not read.
    """
    path = os.path.join(folder, name + SUFFIX)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refused(f"open {path}", error, folder) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        holder = _locked_by(fd)
        return holder if not holder or _lives(holder) else None
    finally:
        os.close(fd)


def _open_locked(folder: str, name: str, *, direct: bool) -> OpenPath:
    """Opens and locks the file of a slab, and makes it if it is missing.

    io_uring keeps the files of a killed process open for a moment after its end, so this waits for such a lock.
    """
    path, give_up = os.path.join(folder, name + SUFFIX), time.monotonic() + ENDED_SECONDS
    while True:
        opened = open_path(path, os.O_RDWR | os.O_CREAT, 0o600, direct=direct, label=folder)
        try:
            fcntl.flock(opened.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            facts = os.fstat(opened.fd)
            if os.path.exists(path) and os.path.samestat(facts, os.stat(path)):
                return opened
            os.close(opened.fd)  # its last owner removed it in between
        except BlockingIOError:
            holder = _locked_by(opened.fd)
            os.close(opened.fd)
            if not (holder and _lives(holder)) and time.monotonic() < give_up:  # 0: it may have ended just now
                time.sleep(0.01)
                continue
            end = "close" if holder == os.getpid() else "end"
            whose = "this process" if end == "close" else f"process {holder}" if holder else "another process"
            raise NvmeError(
                errno.EBUSY,
                f"slab {name!r} in {folder} is in use by {whose}; {end} that one first, or choose another name",
                path=folder,
            ) from None
        except OSError as error:
            os.close(opened.fd)
            raise refused(f"lock {path}", error, folder) from None


def _lives(process: int) -> bool:
    """Whether the process runs or can run. A zombie cannot."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _locked_by(fd: int) -> int:
    """Returns the process that holds the flock of a file, or 0 if /proc/locks does not name it."""
    major, minor = map(int, mount_of(fd).device.split(":"))
    inode = f"{major:02x}:{minor:02x}:{os.fstat(fd).st_ino}"
    with contextlib.suppress(OSError), open("/proc/locks", encoding="ascii") as locks:
        for line in locks:
            fields = line.split()
            if "FLOCK" in fields and inode in fields:
                return int(fields[fields.index(inode) - 1])
    return 0


def _write_whole(folder: str, name: str, text: str) -> None:
    """Writes a file atomically: after a crash it has all of the text, or does not exist. Raises NvmeError."""
    path = os.path.join(folder, name)
    try:
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(f"{path}.new", path)
        sync_folder(folder)
    except OSError as error:
        raise refused(f"write {path}", error, folder) from None

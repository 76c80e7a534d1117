"""Reports what this kernel, filesystem and container allow, and lists named slabs in a folder. Changes nothing."""

from __future__ import annotations

import os
import platform
import sys

from zero_nvme.errors import NvmeError, refused
from zero_nvme.extension import native
from zero_nvme.files import filesystem, named
from zero_nvme.io.io_queue import BACKENDS, Options, attempt

Finding = tuple[str, str, str]  # "ok", "slow" or "no"; the subject; the finding and the way out


def examine(folder: str) -> list[Finding]:
    """Returns the findings about a folder, the most basic first. Raises NvmeError if it does not exist."""
    findings: list[Finding] = [("ok", "kernel", platform.release()), _huge_pages()]
    if native is None:
        findings.append(("slow", "extension", "not built: only the aiofiles backend works; reinstall with a compiler"))
    if memory := filesystem.memory_under(folder):
        findings.append(("no", "filesystem", f"{folder} is on {memory}, which is memory; name a folder on a disk"))
    else:
        findings.append(("ok", "filesystem", filesystem.mount_of(folder).filesystem))
    try:
        findings += _promises(folder)
        findings += [_backend(folder, backend) for backend in BACKENDS]
        findings += [_slab(folder, each) for each in named.names_in(folder)]
    except OSError as error:
        told = error if isinstance(error, NvmeError) else refused(f"a file in {folder}", error, folder)
        findings.append(("no", "files", str(told)))
    return findings


def _slab(folder: str, name: str) -> Finding:
    """Returns the finding about a named slab in the folder: its size, its owner, and how to remove it."""
    path = os.path.join(folder, name + named.SUFFIX)
    size = f"{os.stat(path).st_blocks * 512 / 2**30:.2f} GiB" if os.path.exists(path) else "no bytes"
    try:
        holder = named.holder_of(folder, name)
        found = named.description_of(folder, name)
        made_by = f"made by {found.made_by}" if found is not None else "left unfinished"
    except NvmeError as error:
        return ("no", f"slab {name}", f"{size}: {error}")
    if holder is None:
        return ("ok", f"slab {name}", f"{size}, {made_by}; nobody has it open, `rm {path}*` removes it")
    return ("ok", f"slab {name}", f"{size}, {made_by}; in use by {f'process {holder}' if holder else 'a process'}")


def _promises(folder: str) -> list[Finding]:
    """Returns the findings about the file system's promises for a file in the folder. Raises OSError."""
    path = filesystem.open_nameless(folder, direct=False)
    try:
        free, facts = filesystem.free_bytes(path.fd), os.statvfs(path.fd)
        room = "not counted here" if free == sys.maxsize else f"{free / 2**30:.1f} GiB"
        if reserved := facts.f_frsize * (facts.f_bfree - facts.f_bavail):  # for its administrator
            room += f"; the filesystem reserves {reserved / 2**30:.1f} GiB more, which a slab does not take"
        findings: list[Finding] = [("ok", "free space", room)]
        copied = filesystem.copied_bytes(path.fd, 4096)
        lost = filesystem.UNSYNCED.intersection(filesystem.mount_of(path.fd).options)
        for what, kept, yes, no in (
            ("reserve", filesystem.fallocate(path.fd, 0, 4096), "by fallocate", "no fallocate: zeros are written once"),
            ("overwrite", not copied, "in place", "a copy is written, which takes twice the room"),
            ("locks", filesystem.locks(path.fd), "by flock", "no flock: a slab cannot have a name here"),
            ("sync", not lost, "by fdatasync", f"mounted with {', '.join(lost)}: a power cut loses it"),
        ):
            findings.append(("ok", what, yes) if kept else ("slow", what, no))
    finally:
        filesystem.close_all([path])
    try:
        path = filesystem.open_nameless(folder, direct=True)
    except NvmeError as error:
        return [("slow", "O_DIRECT", f"I/O goes through the page cache: {error}"), *findings]
    filesystem.close_all([path])
    text = f"offsets aligned to {path.alignment} bytes, addresses to {path.memory_alignment}"
    return [("ok", "O_DIRECT", text), *findings]


def _backend(folder: str, backend: str) -> Finding:
    direct = backend != "aiofiles"
    failure = attempt([folder], Options(backend=backend, direct=direct))
    how = "with O_DIRECT" if direct else "through the page cache"
    return ("ok", backend, f"writes and reads back {how}") if failure is None else ("no", backend, failure)


def _huge_pages() -> Finding:
    """Returns the finding about the kernel's setting: `[always]`, `[madvise]` or `[never]`."""
    name = "/sys/kernel/mm/transparent_hugepage/enabled"
    try:
        with open(name) as file:
            text = file.read()
    except OSError as error:
        text = f"[never], as {name} says {error.strerror}"
    if "[never]" not in text:
        return ("ok", "huge pages", text.strip())
    return (
        "slow",
        "huge pages",
        f"{text.strip()}; direct I/O can be 3 times slower: set /sys/kernel/mm/transparent_hugepage/enabled to madvise",
    )

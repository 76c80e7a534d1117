"""Reports what this kernel, filesystem and container allow, and which slabs with a name lie there. Changes nothing."""

from __future__ import annotations

import errno
import os
import platform

from zero_nvme import named, probe
from zero_nvme.errors import NvmeError
from zero_nvme.extension import native
from zero_nvme.filesystem import IN_MEMORY, filesystem_name, free_bytes, open_nameless, reserved_bytes
from zero_nvme.options import BACKENDS, Options

Finding = tuple[str, str, str]  # "ok", "slow" or "no"; the subject; what was found and what to do about it


def examine(folder: str) -> list[Finding]:
    """Returns the findings about a folder, the most basic first. Raises NvmeError if it does not exist."""
    findings: list[Finding] = [("ok", "kernel", platform.release())]
    if native is None:
        findings.append(("slow", "extension", "not built: only the aiofiles backend works; reinstall with a compiler"))
    name = filesystem_name(folder)
    if name in IN_MEMORY:
        findings.append(("no", "filesystem", f"{folder} is on {name}, which is memory; name a folder on a disk"))
    else:
        findings.append(("ok", "filesystem", name))
    try:
        findings += _direct(folder)
        findings += [_backend(folder, backend) for backend in BACKENDS]
    except NvmeError as error:
        findings.append(("no", "files", str(error)))
    findings.append(_huge_pages())
    return [*findings, *(_slab(folder, each) for each in named.names_in(folder))]


def _slab(folder: str, name: str) -> Finding:
    """A slab with a name that lies in the folder: its size, whose it is, and how to be rid of it."""
    path = os.path.join(folder, name + named.SUFFIX)
    size = f"{os.stat(path).st_blocks * 512 / 2**30:.2f} GiB" if os.path.exists(path) else "no bytes"
    try:
        found = named.description_of(folder, name)
        made_by = f"made by {found.made_by}" if found is not None else "left unfinished"
    except NvmeError as error:
        made_by = str(error)
    holder = named.holder_of(folder, name)
    if holder is None:
        return ("ok", f"slab {name}", f"{size}, {made_by}; nobody has it open, `rm {path}*` removes it")
    return ("ok", f"slab {name}", f"{size}, {made_by}; in use by {f'process {holder}' if holder else 'a process'}")


def _direct(folder: str) -> list[Finding]:
    try:
        path = open_nameless(folder, direct=True)
    except NvmeError as error:
        if error.errno != errno.EINVAL:
            raise
        return [("slow", "O_DIRECT", f"refused on {folder}: I/O goes through the page cache")]
    try:
        free, reserved = free_bytes(path.fd), reserved_bytes(path.fd)
        room = f"{free / 2**30:.1f} GiB"
        if reserved:
            room += f"; the filesystem reserves {reserved / 2**30:.1f} GiB more, which a slab does not take"
        text = f"offsets aligned to {path.alignment} bytes, addresses to {path.memory_alignment}"
        return [("ok", "O_DIRECT", text), ("ok", "free space", room)]
    finally:
        os.close(path.fd)


def _backend(folder: str, backend: str) -> Finding:
    direct = backend != "aiofiles"
    failure = probe.attempt([folder], Options(backend=backend, direct=direct))
    how = "with O_DIRECT" if direct else "through the page cache"
    return ("ok", backend, f"writes and reads back {how}") if failure is None else ("no", backend, failure)


def _huge_pages() -> Finding:
    """What the kernel's setting says: `[always]`, `[madvise]` or `[never]` is in force."""
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

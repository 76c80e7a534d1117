"""Where people put their slabs: file systems and limits, each made small as root, and what a run there must end in."""

import contextlib
import os
import resource
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.zero_nvme.faults import DENY

PAGE, BEGIN, END = Path(__file__).parents[2] / "docs" / "placement.md", "<!-- disks -->", "<!-- end of disks -->"
Program = subprocess.Popen[bytes]
MIB = 1 << 20
USER = 65534  # nobody
XFS: dict[str, Any] = {"make": "mkfs.xfs -q -f", "size": 320 * MIB}
BTRFS: dict[str, Any] = {"make": "mkfs.btrfs -q -f", "size": 128 * MIB}


class Absent(Exception):
    """This machine cannot make the place; the text says why."""


@dataclass
class Folder:
    """A folder on a place. event: happens before the fourth step, by default the disk fills up. mend: undoes it. note:
    what the table says besides."""

    path: Path
    allow_memory: bool = False
    limit: Callable[[], object] = lambda: None  # in the process that trains, before anything
    before: Callable[[], object] = lambda: None  # between the first process and the second
    event: Callable[[], object] | None = None
    mend: Callable[[], object] = lambda: None
    folders: list[Path] = field(default_factory=list)  # instead of the path alone
    note: str = ""


@dataclass(frozen=True)
class Place:
    name: str
    make: Callable[[ExitStack, Path], Folder]
    packages: tuple[str, ...] = ()  # of Debian
    refused: str = ""  # a pattern of the error that it must end in
    stops: str = ""  # a pattern of the error that the run stops with, before it goes on


PLACES: list[Place] = []


def place(name: str, *packages: str, refused: str = "", stops: str = "") -> Callable[..., Callable[..., Folder]]:
    def listed(make: Callable[[ExitStack, Path], Folder]) -> Callable[[ExitStack, Path], Folder]:
        PLACES.append(Place(name, make, packages, refused, stops))
        return make

    return listed


# -- how they are made ------------------------------------------------------------------------------------------------


def call(*command: str | Path) -> str:
    try:
        words = [str(word) for word in command]
        return subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
    except OSError as error:
        raise Absent(str(error)) from None
    except subprocess.CalledProcessError as error:
        raise Absent(f"{command[0]}: {(error.stderr or error.stdout).strip().splitlines()[-1:]}") from None


def unmount(mount: Path) -> None:
    for _ in range(100):  # io_uring holds the files of a killed process for a moment
        done = subprocess.run(["umount", mount], capture_output=True, text=True, check=False)
        if done.returncode == 0 or "not mounted" in done.stderr:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "--lazy", mount], check=False)


def device(stack: ExitStack, work: Path, size: int) -> Path:
    """A block device of a file without blocks."""
    image = work / f"image{len(list(work.iterdir()))}"
    image.touch()
    os.truncate(image, size)
    found = call("losetup", "--find", "--show", image)
    stack.callback(subprocess.run, ["losetup", "--detach", found], check=False)
    return Path(found)


def mounted(
    stack: ExitStack, work: Path, make: str = "mkfs.ext4 -q -F -m 0", options: str = "", size: int = 64 * MIB,
    on: Path | None = None,
) -> Path:  # fmt: skip
    """A new file system on a loop device, or `on` another one."""
    on = on or device(stack, work, size)
    call(*make.split(), on)
    return attached(stack, work, on, *(("-o", options) if options else ()))


def attached(stack: ExitStack, work: Path, source: str | Path, *options: str | Path) -> Path:
    target = work / f"mount{len(list(work.iterdir()))}"
    target.mkdir()
    call("mount", *options, source, target)
    stack.callback(unmount, target)
    return target


def served(stack: ExitStack, work: Path, *command: str | Path, **options: Any) -> tuple[Path, Program]:
    """A mount that a program serves in the foreground, and the program. "MOUNT" in `command` stands for the mount."""
    target = work / f"mount{len(list(work.iterdir()))}"
    target.mkdir()
    words = [str(target) if word == "MOUNT" else str(word) for word in command]
    nowhere = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        program: Program = subprocess.Popen(words, **nowhere | options)
    except OSError as error:
        raise Absent(str(error)) from None

    def end() -> None:
        unmount(target)
        program.terminate()
        program.wait()

    stack.callback(end)
    for _ in range(200):
        if os.path.ismount(target):
            return target, program
        time.sleep(0.05)
    raise Absent(f"{words[0]} has mounted nothing after 10 s (exit status {program.poll()})")


def below(stack: ExitStack, work: Path, *names: str) -> list[Path]:
    """Folders on a small ext4."""
    disk = mounted(stack, work)
    for name in names:
        (disk / name).mkdir()
    return [disk / name for name in names]


def in_memory(stack: ExitStack, work: Path, kind: str = "tmpfs") -> Path:
    return attached(stack, work, kind, "-t", kind, *(("-o", "size=64M") if kind == "tmpfs" else ()))


def on_disk(name: str, *packages: str, **how: Any) -> None:
    """Lists a new file system about which there is nothing else. how: of `mounted`."""
    place(name, *packages)(lambda stack, work: Folder(mounted(stack, work, **how)))


def over_folders(package: str, command: str) -> None:
    """Lists what a program of FUSE mounts over folders on ext4: {0}, {1} and {2} of its command."""

    def make(stack: ExitStack, work: Path) -> Folder:
        words = shlex.split(command.format(*below(stack, work, "a", "b", "c")))
        return Folder(served(stack, work, *words)[0])

    place(package, package)(make)


# -- file systems of the kernel ---------------------------------------------------------------------------------------


on_disk("ext4")
on_disk("ext4 without a journal", make="mkfs.ext4 -q -F -m 0 -O ^has_journal")
on_disk("ext4, data=journal", options="data=journal")
on_disk("ext3", make="mkfs.ext3 -q -F -m 0")
on_disk("ext2", make="mkfs.ext2 -q -F -m 0")
on_disk("XFS", "xfsprogs", **XFS)


def changed_between(disk: Path, change: Callable[[], object]) -> Folder:
    """A disk on which something else changes, and fills it, before the run goes on."""

    def before() -> None:
        os.unlink(disk / "filler")
        change()
        fill(disk)

    return Folder(disk, before=before, mend=lambda: os.unlink(disk / "filler"))


@place("XFS, the slab copied by reflink", "xfsprogs", stops="xfs copies .* of them when")
def xfs_reflink(stack: ExitStack, work: Path) -> Folder:
    disk = mounted(stack, work, **XFS)
    return changed_between(disk, lambda: call("cp", "--reflink=always", disk / "run.slab", disk / "copy"))


on_disk("btrfs", "btrfs-progs", **BTRFS)
on_disk("btrfs, compress=zstd", "btrfs-progs", options="compress-force=zstd", **BTRFS)


@place("btrfs, a folder with chattr +c", "btrfs-progs")
def btrfs_compressed_folder(stack: ExitStack, work: Path) -> Folder:
    folder = mounted(stack, work, **BTRFS) / "c"
    folder.mkdir()
    call("chattr", "+c", folder)
    return Folder(folder)


@place(
    "btrfs, a snapshot of the slab",
    "btrfs-progs",
    stops="btrfs copies .* of them when.* snapshots by `btrfs subvolume delete`",
)
def btrfs_snapshot(stack: ExitStack, work: Path) -> Folder:
    disk = mounted(stack, work, **BTRFS)
    folder = disk / "now"
    call("btrfs", "subvolume", "create", folder)

    def taken() -> None:
        os.unlink(folder / "filler")
        call("btrfs", "subvolume", "snapshot", folder, disk / "then")
        fill(folder)

    def room() -> None:  # btrfs overwrites nothing in place that is older than a snapshot, though it is deleted
        call("btrfs", "subvolume", "delete", "--commit-after", disk / "then")
        os.unlink(folder / "filler")

    return Folder(folder, before=taken, mend=room)


@place("btrfs, a slab from before chattr +C", "btrfs-progs", stops="btrfs copies .* of them when")
def btrfs_old(stack: ExitStack, work: Path) -> Folder:
    disk = mounted(stack, work, **BTRFS)

    def older() -> None:
        call("cp", "--reflink=never", disk / "run.slab", disk / "old")
        os.rename(disk / "old", disk / "run.slab")

    return changed_between(disk, older)


@place("btrfs, a quota group", "btrfs-progs", refused="a disk quota is used up")
def btrfs_quota(stack: ExitStack, work: Path) -> Folder:
    disk = mounted(stack, work, **BTRFS)
    call("btrfs", "quota", "enable", disk)
    call("btrfs", "qgroup", "limit", "1M", disk)
    return Folder(disk)


def overlay(stack: ExitStack, work: Path, disk: Path, options: str = "", lower: Path | None = None) -> Path:
    """Over folders of a disk, or over `lower`."""
    for name in ("lower", "upper", "work"):
        (disk / name).mkdir()
    where = f"lowerdir={lower or disk / 'lower'},upperdir={disk}/upper,workdir={disk}/work{options}"
    return attached(stack, work, "overlay", "-t", "overlay", "-o", where)


place("overlay on ext4")(lambda stack, work: Folder(overlay(stack, work, mounted(stack, work))))
place("overlay on ext4, volatile")(lambda stack, work: Folder(overlay(stack, work, mounted(stack, work), ",volatile")))
place("overlay on tmpfs", refused="is on overlay on tmpfs, which is memory")(
    lambda stack, work: Folder(overlay(stack, work, in_memory(stack, work)))
)


@place("overlay on tmpfs over ext4, allow_memory=True")
def overlay_allowed(stack: ExitStack, work: Path) -> Folder:
    (lower,) = below(stack, work, "a")
    return Folder(overlay(stack, work, in_memory(stack, work), lower=lower), allow_memory=True)


def memory(name: str, kind: str, refused: str = "", **how: Any) -> None:
    place(name, refused=refused)(lambda stack, work: Folder(in_memory(stack, work, kind), **how))


memory("tmpfs", "tmpfs", "is on tmpfs, which is memory")
memory("tmpfs, allow_memory=True", "tmpfs", allow_memory=True)
memory("ramfs, allow_memory=True", "ramfs", allow_memory=True, event=lambda: None, note="; it is never full")
memory("devtmpfs", "devtmpfs", "is on devtmpfs, which is memory")
memory("hugetlbfs", "hugetlbfs", "is on hugetlbfs, which is memory")


@place("ext4 on zram", refused="is on ext4 on zram, which is memory")
def zram(stack: ExitStack, work: Path) -> Folder:
    number = int(Path("/sys/class/zram-control/hot_add").read_text())
    stack.callback(Path("/sys/class/zram-control/hot_remove").write_text, str(number))
    Path(f"/sys/block/zram{number}/disksize").write_text(str(64 * MIB))
    stack.callback(Path(f"/sys/block/zram{number}/reset").write_text, "1")
    return Folder(mounted(stack, work, on=Path(f"/dev/zram{number}")))


place("a bind mount of ext4")(lambda stack, work: Folder(attached(stack, work, below(stack, work, "a")[0], "--bind")))


@place("ext4, read-only", refused="Read-only file system; name a folder in which this user may write")
def read_only(stack: ExitStack, work: Path) -> Folder:
    disk = mounted(stack, work)
    call("mount", "-o", "remount,ro", disk)
    return Folder(disk)


# -- FUSE -------------------------------------------------------------------------------------------------------------


over_folders("bindfs", "bindfs -f {0} MOUNT")


@place(
    "bindfs whose daemon is killed",
    "bindfs",
    stops="the mount's program has ended: mount it again.*check the disk and its free space, then .*restart the run",
)
def bindfs_killed(stack: ExitStack, work: Path) -> Folder:
    (folder,) = below(stack, work, "a")
    target, program = served(stack, work, "bindfs", "-f", folder, "MOUNT")

    def again() -> None:
        call("umount", "--lazy", target)
        more = subprocess.Popen(["bindfs", "-f", folder, target], stdout=subprocess.DEVNULL)
        stack.callback(more.wait)
        stack.callback(unmount, target)
        while not os.path.ismount(target):
            time.sleep(0.05)

    return Folder(target, event=lambda: os.kill(program.pid, signal.SIGKILL), mend=again)


over_folders("mergerfs", "mergerfs -f -o minfreespace=0 {0}:{1} MOUNT")


@place("gocryptfs", "gocryptfs")
def gocryptfs(stack: ExitStack, work: Path) -> Folder:
    (folder,), password = below(stack, work, "a"), ("-q", "-extpass", "echo x")
    call("gocryptfs", "-init", "-scryptn", "10", *password, folder)
    return Folder(served(stack, work, "gocryptfs", "-fg", *password, folder, "MOUNT")[0])


over_folders("encfs", "encfs -f --standard '--extpass=echo x' {0} MOUNT")


@place("sshfs", "sshfs", "openssh-sftp-server")
def sshfs(stack: ExitStack, work: Path) -> Folder:
    (folder,) = below(stack, work, "a")
    mine, theirs = socket.socketpair()
    server = subprocess.Popen(["/usr/lib/openssh/sftp-server"], stdin=theirs, stdout=theirs)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    command = ("sshfs", "-f", "-o", "passive", f":{folder}", "MOUNT")
    return Folder(served(stack, work, *command, stdin=mine, stdout=mine)[0])


@place("rclone mount", "rclone", "fuse3")
def rclone(stack: ExitStack, work: Path) -> Folder:
    folder, cache = below(stack, work, "a", "cache")
    how = ("--vfs-cache-mode", "full", "--config", "/dev/null", "--cache-dir", cache)
    mount, _ = served(stack, work, "rclone", "mount", *how, folder, "MOUNT")
    return Folder(mount, event=lambda: None, note="; not on a full disk, where rclone waits for room")


def on_device(name: str, make: str, command: str, *packages: str, stops: str = "") -> None:
    """Lists a file system that a program of FUSE mounts. {} in its command is the device."""

    def made(stack: ExitStack, work: Path) -> Folder:
        disk = device(stack, work, 64 * MIB)
        call(*make.split(), disk)
        mount, _ = served(stack, work, *command.format(disk).split())
        return Folder(mount, mend=lambda: os.unlink(mount / "filler"))

    place(name, *packages, stops=stops)(made)


on_device("ntfs-3g", "mkntfs -F -Q -q", "ntfs-3g -o no_detach {} MOUNT", "ntfs-3g")
on_device("exfat-fuse", "mkfs.exfat", "mount.exfat-fuse -d {} MOUNT", "exfat-fuse", "exfatprogs")
# On a full disk it has no block for the extents that a first write into reserved room splits; ext4 itself has.
no_block = "No space left on device.*restart the run"
on_device("fuse2fs", "mkfs.ext4 -q -F", "fuse2fs -f {} MOUNT", "fuse2fs", stops=no_block)


over_folders("unionfs-fuse", "unionfs -f -o cow {0}=RW:{1}=RO MOUNT")
over_folders("fuse-overlayfs", "fuse-overlayfs -f -o lowerdir={0},upperdir={1},workdir={2} MOUNT")
over_folders("disorderfs", "disorderfs -f {0} MOUNT")


# -- limits and faults ------------------------------------------------------------------------------------------------


@place("ext4, `ulimit -f`", refused=r"a file of this process may have 1048576 bytes: start it after `ulimit -f unl")
def ulimit(stack: ExitStack, work: Path) -> Folder:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))

    return Folder(mounted(stack, work), limit=limited)


@place("ext4, no inodes", refused="inodes are in use: remove files there")
def inodes(stack: ExitStack, work: Path) -> Folder:
    disk, number = mounted(stack, work, "mkfs.ext4 -q -F -m 0 -N 16"), 0
    with contextlib.suppress(OSError):
        while True:
            (disk / str(number := number + 1)).touch()
    return Folder(disk)


@place("ext4, another user's folder", refused="Permission denied; name a folder in which this user may write")
def forbidden(stack: ExitStack, work: Path) -> Folder:
    disk = mounted(stack, work)
    disk.chmod(0o700)
    return Folder(disk, limit=lambda: os.setuid(USER))


@place("ext4, full from the start", refused="bytes free .* are needed")
def full(stack: ExitStack, work: Path) -> Folder:
    disk = mounted(stack, work)
    fill(disk)
    os.truncate(disk / "filler", os.path.getsize(disk / "filler") - MIB)
    return Folder(disk)


@place("one folder twice", refused="give each folder once")
def twice(stack: ExitStack, work: Path) -> Folder:
    return Folder(disk := mounted(stack, work), folders=[disk, disk])


for what, number in {"io_uring": 425, "fallocate": 285}.items():
    place(f"ext4, in a container without {what}")(
        lambda stack, work, number=number: Folder(mounted(stack, work), limit=lambda: deny([number]))
    )


def fill(folder: Path) -> None:
    """Writes until nothing is free. Some mounts take more than there is into their cache, so twice is the end."""
    facts = os.statvfs(folder)
    left = 2 * facts.f_bavail * facts.f_frsize
    with contextlib.suppress(OSError), open(folder / "filler", "ab", buffering=0) as file:
        for nbytes in (MIB, 4096):
            with contextlib.suppress(OSError):
                while left > 0:
                    left -= file.write(os.urandom(nbytes))
        os.fsync(file.fileno())


def deny(calls: list[int]) -> None:
    """Refuses system calls of x86-64 with EPERM, as a container's filter does."""
    names: dict[str, Callable[[list[int]], None]] = {}
    exec(DENY, names)
    names["deny"](calls)

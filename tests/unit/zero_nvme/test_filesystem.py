"""What a file system promises, where none is mounted for it: `python -m tests.disks` asks real ones."""

import errno
import os
import sys
import types

import pytest

import zero_nvme
from tests.conformance.zero_nvme.suites import read, written
from tests.disks.places import BEGIN, END, PAGE, PLACES
from tests.integration.zero_nvme.faults import run_python
from zero_nvme import NvmeError, Slab, errors
from zero_nvme.__main__ import main
from zero_nvme.files import filesystem, named
from zero_nvme.io import io_queue
from zero_nvme.tools import doctor

pytestmark = pytest.mark.promise("slab-room")

MIB = 1 << 20


def made(folder, **options):
    return Slab(folder, allow_memory=True, **options)


def findings(folder):
    return {subject: (verdict, text) for verdict, subject, text in doctor.examine(str(folder))}


def test_a_file_system_without_fallocate_is_written_once(tmp_path, monkeypatch):
    """In blocks, with the bytes in the log; Ctrl-C between two of them gives the room back."""
    monkeypatch.setattr(filesystem, "fallocate", lambda *_: False)
    monkeypatch.setattr(filesystem, "ZEROS_BYTES", MIB)
    with made(tmp_path, name="run", capacity_bytes=4 * MIB) as slab:
        there = os.stat(tmp_path / "run.slab")
        assert (there.st_size, there.st_blocks * 512) == (4 * MIB, 4 * MIB)
        extent = written(slab, b"12345678")
        pwrite, places = os.pwrite, []

        def interrupted(fd, block, at):
            if at >= 6 * MIB:
                raise KeyboardInterrupt
            places.append(at)
            return pwrite(fd, block, at)

        monkeypatch.setattr(os, "pwrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            slab.reserve(8 * MIB)
        assert places == [4 * MIB, 5 * MIB] and slab.capacity_bytes == 4 * MIB
        assert os.stat(tmp_path / "run.slab").st_size == 4 * MIB
        assert read(slab, extent) == b"12345678"


def test_writing_zeros_says_how_far_it_is(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(filesystem, "fallocate", lambda *_: False)
    monkeypatch.setattr(filesystem, "ZEROS_BYTES", MIB)
    monkeypatch.setattr(filesystem, "PROGRESS_SECONDS", -1.0)
    made(tmp_path, capacity_bytes=2 * MIB).close()
    assert [f"{tmp_path} cannot reserve room, so zeros are written: {n * MIB} of {2 * MIB} bytes" for n in (1, 2)] == [
        record.getMessage() for record in caplog.records
    ]


def test_what_overwriting_takes_has_to_be_free(tmp_path, monkeypatch):
    """As on btrfs for a slab that a snapshot shares, also where the slab has all of its bytes already."""
    made(tmp_path, name="run", capacity_bytes=MIB).close()
    with made(tmp_path, name="run") as slab:
        slab.claim(0, MIB)
        monkeypatch.setattr(filesystem, "copied_bytes", lambda fd, nbytes: nbytes)
        slab.reserve(MIB)
        monkeypatch.setattr(filesystem, "free_bytes", lambda fd: MIB - 1)
        told = rf"{MIB} are needed .*removing copies, and snapshots by `btrfs subv"
        with pytest.raises(NvmeError, match=told) as caught:
            slab.reserve(MIB)
        assert (caught.value.errno, caught.value.wanted, caught.value.got) == (errno.ENOSPC, MIB, MIB - 1)


@pytest.mark.promise("durable-full-disk")
def test_a_slab_that_is_there_opens_on_a_full_disk(tmp_path, monkeypatch):
    """Fails if the probe needs room. A new one has none."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    with made(folders, name="run", weights=[1, 1], block_bytes=4096) as slab:
        extent = written(slab, bytes(range(256)) * 32)

    def full(folder, *, direct):
        raise errors.refused(f"cannot create a file in {folder}", OSError(errno.ENOSPC, ""), folder)

    monkeypatch.setattr(filesystem, "open_nameless", full)
    with made(folders, name="run", block_bytes=4096) as slab:
        assert slab.found and "read the first block" in slab.reason
        assert read(slab, slab.claim(extent.offset_bytes, 8192)) == bytes(range(256)) * 32
    with pytest.raises(NvmeError, match="ENOSPC.*free space there, or name another path"):
        made(folders, name="other", weights=[1, 1])


def test_o_direct_without_an_effect_is_not_taken(tmp_path, monkeypatch):
    """As with data=journal. Fails if the slab says that it is direct."""
    monkeypatch.setattr(filesystem, "direct_alignment", lambda fd: (0, 0))
    with made(tmp_path) as slab:
        assert not slab.direct and slab.reason.startswith(f"open O_DIRECT in {tmp_path}: ENOTSUP")
    assert findings(tmp_path)["O_DIRECT"] == (
        "slow",
        f"I/O goes through the page cache: [ENOTSUP] O_DIRECT in {tmp_path}: Operation not supported; the file system "
        "cannot: name another path",
    )
    with pytest.raises(zero_nvme.BackendUnavailable, match="leave backend and direct out"):
        made(tmp_path, direct=True)


@pytest.mark.promise("free-bytes")
def test_a_file_system_that_counts_no_blocks_has_room(tmp_path, monkeypatch):
    """As ramfs. It was refused with 0 bytes free."""
    facts = types.SimpleNamespace(f_blocks=0, f_frsize=4096, f_bavail=0, f_bfree=0)
    monkeypatch.setattr(os, "statvfs", lambda path: facts)
    assert filesystem.free_bytes(str(tmp_path)) == sys.maxsize
    made(tmp_path, capacity_bytes=MIB).close()
    assert findings(tmp_path)["free space"] == ("ok", "not counted here")


def test_a_limit_of_file_sizes_is_told_and_can_be_raised(tmp_path):
    told = run_python(
        """
import resource, sys, zero_nvme
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        zero_nvme.Slab(sys.argv[1], 2 << 20, allow_memory=True).close()
        print("made")
    except zero_nvme.NvmeError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # ulimit -f unlimited
""",
        str(tmp_path),
    ).splitlines()
    assert "may have 1048576 bytes" in told[0] and "start it after `ulimit -f unlimited`" in told[0]
    assert told[1:] == ["made"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "all of its 10 inodes are in use: remove files there, or name another path"),
        (errno.EDQUOT, r"a disk quota is used up \(`quota -s`, `btrfs qgroup show`\): remove files, or have it raised"),
        (errno.EFBIG, "no files of that size: name another path, or several folders of it"),
        (errno.ENOTCONN, "the mount's program has ended: mount it again"),
        (errno.ECONNABORTED, "the mount's program has ended: mount it again"),
        (errno.ENOTDIR, "name the folder that it is in"),
        (errno.ESTALE, "gone there with its name: give the slab a name=, or name another path"),
        (errno.ENOLCK, "the file system cannot: name another path"),
        (errno.EROFS, "name a folder in which this user may write"),
    ],
)
def test_errors_of_the_kernel_have_a_way_out(tmp_path, monkeypatch, code, said):
    """Also where the probe finds them: its advice was to leave backend= out, which nobody had given."""
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_files=10, f_favail=0))
    with pytest.raises(NvmeError, match=said):
        raise errors.refused("it", OSError(code, ""), str(tmp_path))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_probe_without_room_says_so(tmp_path, monkeypatch, code):
    """And does not try every backend, to say that none works."""

    def submit(*_):
        raise errors.refused("write", OSError(code, ""), str(tmp_path))

    monkeypatch.setattr(io_queue.IOQueue, "_start", submit)
    with pytest.raises(NvmeError) as caught:
        made(tmp_path)
    assert caught.value.errno == code and not isinstance(caught.value, zero_nvme.BackendUnavailable)


def test_no_backend_at_all_names_another_path(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(io_queue, "attempt", lambda *_, **__: "it fails")
        with pytest.raises(zero_nvme.BackendUnavailable, match="it fails; .*name another path"):
            made(tmp_path)
    made(tmp_path).close()
    with pytest.raises(zero_nvme.BackendUnavailable, match="aiofiles cannot do O_DIRECT; leave direct out"):
        made(tmp_path, backend="aiofiles", direct=True)
    made(tmp_path, backend="aiofiles").close()


def test_doctor_of_what_is_no_folder_and_of_one_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    """Fails with a traceback otherwise. The name of its folder works."""
    (tmp_path / "file").touch()
    assert main(["doctor", str(tmp_path / "file")]) == 1
    assert "Not a directory; name the folder that it is in" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "missing")]) == 1
    assert "missing" in capsys.readouterr().err

    def unreadable(folder):
        raise PermissionError(errno.EACCES, "", folder)

    monkeypatch.setattr(os, "listdir", unreadable)
    assert main(["doctor", str(tmp_path)]) == 1
    assert "Permission denied; name a folder in which this user may write" in capsys.readouterr().out


def test_a_slab_of_another_user_is_not_said_to_be_free(tmp_path, monkeypatch):
    """Its lock cannot be asked for: `rm` was advised."""
    made(tmp_path, name="run").close()
    open_file = os.open

    def forbidden(path, flags, *mode, **options):
        if str(path).endswith("run.slab"):
            raise PermissionError(errno.EACCES, "", path)
        return open_file(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(NvmeError, match="Permission denied"):
        named.holder_of(str(tmp_path), "run")
    assert findings(tmp_path)["slab run"][0] == "no"


def test_a_slab_of_this_process_or_of_one_folder_twice_says_so(tmp_path):
    told = "by this process; close .*that one first, or choose"
    with made(tmp_path, name="run"), pytest.raises(NvmeError, match=told):
        made(tmp_path, name="run")
    with pytest.raises(ValueError, match="a folder twice .*; give each folder once"):
        made([tmp_path, tmp_path / "."], name="twice", weights=[1, 1])
    made([tmp_path], name="twice").close()


def test_a_file_that_cannot_be_closed_keeps_no_other_open(tmp_path, monkeypatch):
    """As ENOTCONN of a FUSE mount whose program has ended, after SwapError has told it."""
    slab = made([tmp_path, tmp_path], weights=[1, 1])
    fds, close = [path.fd for path in slab._paths], os.close

    def failing(fd):
        close(fd)
        if fd in fds:
            raise OSError(errno.ENOTCONN, "")

    monkeypatch.setattr(os, "close", failing)
    slab.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_what_cannot_be_closed_at_exit_keeps_no_other_open(tmp_path):
    """The error is told once the others are closed."""
    said = run_python(
        """
import sys, zero_nvme
from zero_nvme.io import io_queue
slabs = [zero_nvme.Slab(sys.argv[1], allow_memory=True) for _ in range(3)]
closed = []
for slab in slabs:
    def close(slab=slab):
        zero_nvme.Slab.close(slab)
        closed.append(slab)
        raise OSError("it cannot")
    slab._close_at_exit = close
try:
    io_queue._at_exit()
except OSError as error:
    print(len(closed), error)
io_queue._live.clear()
""",
        str(tmp_path),
    )
    assert said == "3 it cannot"


def test_the_table_of_the_page_has_every_place():
    """`nox -s disks` writes it."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [line.split("|")[1].strip() for line in table.strip().splitlines()[2:]]
    assert rows == [place.name for place in PLACES] and len(rows) >= 25


def test_what_is_in_memory_is_named():
    if filesystem.mount_of("/dev/shm").filesystem != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    assert filesystem.memory_under("/dev/shm") == "tmpfs"
    with pytest.raises(NvmeError, match="name a folder on a disk, or pass allow_memory=True"):
        Slab("/dev/shm")
    made("/dev/shm").close()
    told = "/dev/shm is on tmpfs, which is memory; name a folder on a disk"
    assert findings("/dev/shm")["filesystem"] == ("no", told)

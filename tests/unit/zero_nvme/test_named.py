"""Slabs with a name: torn and foreign descriptions, killed owners, a device whose sync fails."""

import errno
import json
import os
import signal

import pytest

from tests.conformance.zero_nvme.suites import BLOCK, PAGE, random_bytes, read
from tests.integration.zero_nvme.faults import start_python
from zero_nvme import NvmeError, Slab, wait_all
from zero_nvme.files.named import description_of, holder_of, names_in


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", ".."])
def test_names_are_file_names(tmp_path, name):
    with pytest.raises(ValueError, match="must be a file name"):
        Slab(tmp_path, name=name)


@pytest.mark.parametrize("folders", [1, 3])
def test_a_slab_with_a_name_is_found_again(tmp_path, folders):
    """Breaks if its bytes have moved, or a claimed extent is allocated again."""
    paths, data = [tmp_path / str(n) for n in range(folders)], [random_bytes(n, n) for n in (5, 3 * BLOCK + 7, PAGE)]
    for path in paths:
        path.mkdir()

    def opened():
        return Slab(paths, name="kept", block_bytes=BLOCK, weights=[2, 1, 1][:folders])

    with opened() as slab:
        assert not slab.found
        extents = [slab.allocate(len(piece)) for piece in data]
        wait_all([slab.write(extent, piece) for extent, piece in zip(extents, data, strict=True)])
        slab.sync()
        assert all(any((path / "kept.slab").read_bytes()) for path in paths)  # striped over all of them
    with opened() as slab:
        assert slab.found
        for extent, piece in zip(reversed(extents), reversed(data), strict=True):
            assert slab.claim(extent.offset_bytes, extent.nbytes) == extent
            assert read(slab, extent) == piece
        with pytest.raises(ValueError, match="claim each extent once"):
            slab.claim(extents[0].offset_bytes, 1)
        others = [slab.allocate(PAGE) for _ in range(8)]
        taken = [(e.offset_bytes, e.offset_bytes + e.nbytes) for e in extents]
        assert all(e.offset_bytes >= last or e.offset_bytes + PAGE <= first for e in others for first, last in taken)
        with pytest.raises(NvmeError, match="its files were cut") as caught:
            slab.claim(1 << 40, 1)
        assert caught.value.errno == errno.ENODATA
        slab.remove()
    with opened() as slab:
        assert not slab.found
        slab.remove()


@pytest.mark.advice("remove {}.slab* there")
@pytest.mark.promise("named-slab")
def test_a_description_that_is_cut_anywhere_is_refused(tmp_path):
    """Or read as it was: never a slab with another striping."""
    Slab(tmp_path, name="run").close()
    path = tmp_path / "run.slab.json"
    text = path.read_text()
    for length in range(len(text)):
        path.write_text(text[:length])
        with pytest.raises(NvmeError, match=r"does not describe a slab .*; remove run\.slab"):
            description_of(str(tmp_path), "run")
    with pytest.raises(NvmeError, match="does not describe a slab"):
        Slab(tmp_path, name="run")
    path.write_text(text)
    with Slab(tmp_path, name="run") as slab:
        assert slab.found
    path.write_text("{")
    for left in tmp_path.glob("run.slab*"):
        left.unlink()
    with Slab(tmp_path, name="run") as slab:
        assert not slab.found


@pytest.mark.promise("named-slab")
def test_a_slab_that_was_not_finished_is_made_anew(tmp_path):
    (tmp_path / "run.slab").touch()
    with Slab(tmp_path, name="run") as slab:
        assert not slab.found


@pytest.mark.advice("bring that file too, or remove {}.slab")
@pytest.mark.promise("named-slab")
def test_bytes_without_their_description_are_kept(tmp_path):
    """As of a slab that was moved without its second file."""
    with Slab(tmp_path, name="run") as slab:
        slab.write(slab.allocate(PAGE), bytes(PAGE)).wait()
    described = (tmp_path / "run.slab.json").rename(tmp_path / "elsewhere")
    with pytest.raises(NvmeError, match=r"has bytes, and no run.slab.json .*; bring that file too, or remove run"):
        Slab(tmp_path, name="run")
    described.rename(tmp_path / "run.slab.json")
    with Slab(tmp_path, name="run") as slab:
        assert slab.found and os.path.getsize(tmp_path / "run.slab") >= PAGE
    (tmp_path / "run.slab.json").unlink()
    (tmp_path / "run.slab").unlink()
    with Slab(tmp_path, name="run") as slab:
        assert not slab.found


def test_a_newer_description_is_refused(tmp_path):
    Slab(tmp_path, name="run").close()
    path = tmp_path / "run.slab.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2, "of_tomorrow": True}))
    with pytest.raises(NvmeError, match="has format 2, and this zero-nvme knows up to 1"):
        Slab(tmp_path, name="run")


@pytest.mark.promise("named-slab")
def test_folders_that_do_not_belong_together_are_refused(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    Slab(folders, name="run", weights=[2, 1, 1]).close()
    with pytest.raises(NvmeError, match="number 2, 1, 3.* of them; give all of them, in their order"):
        Slab([folders[1], folders[0], folders[2]], name="run")
    with pytest.raises(NvmeError, match="was made with 3 folders, and these are number 1, 2 of them"):
        Slab(folders[:2], name="run")
    with pytest.raises(ValueError, match=r"leave weights= out and pass block_bytes=\d+"):
        Slab(folders, name="run", weights=[1, 2, 1])
    Slab(folders, name="run", block_bytes=4194304).close()
    Slab(folders[0], name="other").close()
    with pytest.raises(NvmeError, match="has no part of it in .*; give the folders that it was made with, or remove"):
        Slab(folders[:2], name="other")
    Slab(folders[0], name="other").close()
    Slab(folders[1], name="other").close()
    with pytest.raises(NvmeError, match="has a part of another slab of that name"):
        Slab(folders[:2], name="other")


@pytest.mark.promise("named-slab")
def test_the_lock_of_a_killed_process_is_free(tmp_path):
    """While it lives its number is told, to a second slab and to whoever lists what lies around."""
    script = """
import sys, time, zero_nvme
slab = zero_nvme.Slab(sys.argv[1], name="run")
print("ready", flush=True)
time.sleep(300)
"""
    process = start_python(script, str(tmp_path))
    assert process.stdout.readline().strip() == "ready"
    assert names_in(str(tmp_path)) == ["run"]
    assert holder_of(str(tmp_path), "run") == process.pid
    with pytest.raises(NvmeError, match=f"is in use by process {process.pid};"):
        Slab(tmp_path, name="run")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not holder_of(str(tmp_path), "run")  # nobody, or 0: io_uring keeps the lock for a moment
    with Slab(tmp_path, name="run") as slab:
        assert slab.found


def test_a_lock_that_ends_while_its_holder_is_looked_up_is_taken(tmp_path, monkeypatch):
    """Then nobody is named as its holder."""
    held = Slab(tmp_path, name="run", allow_memory=True)
    monkeypatch.setattr("zero_nvme.files.named._locked_by", lambda fd: held.close() or 0)
    with Slab(tmp_path, name="run", allow_memory=True) as slab:
        assert slab.found


def test_a_slab_whose_files_are_unlinked_is_used_on(tmp_path):
    with Slab(tmp_path, name="run", allow_memory=True) as slab:
        extent = slab.allocate(4)
        slab.unlink()
        assert names_in(str(tmp_path)) == []
        slab.write(extent, b"left").wait()
        assert read(slab, extent) == b"left"


@pytest.mark.promise("durable-sync-fails")
def test_after_a_failed_sync_nothing_is_known(tmp_path, monkeypatch):
    """The kernel reports a lost write once; a second sync that succeeds says nothing about it."""
    with Slab(tmp_path, name="run") as slab:
        calls = []

        def failing(fd):
            calls.append(fd)
            raise OSError(errno.EIO, "lost")

        monkeypatch.setattr(os, "fdatasync", failing)
        with pytest.raises(NvmeError, match="fdatasync of Slab 'run' in .*Input/output error"):
            slab.sync()
        monkeypatch.undo()
        with pytest.raises(NvmeError, match="fdatasync of Slab 'run'"):
            slab.sync()
        assert len(calls) == 1

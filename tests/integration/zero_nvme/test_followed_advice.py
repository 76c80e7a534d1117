"""Advice of zero-nvme that is followed: each test makes a mistake, does what the error says, and that works."""

import os

import pytest

import zero_nvme
from zero_nvme import NvmeError
from zero_nvme.files import filesystem
from zero_nvme.io import io_queue
from zero_nvme.tools import doctor


def made(folder, **options):
    return zero_nvme.Slab(folder, allow_memory=True, **options)


@pytest.mark.advice("weights for {} paths; give one for each")
def test_a_slab_is_opened_as_an_error_says(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="2 weights for 1 paths; give one for each"):
        made(tmp_path, weights=[1, 2])
    made(tmp_path, weights=[1]).close()
    with pytest.raises(ValueError, match="does not exist; choose auto or one of threads|does not exist; choose auto"):
        made(tmp_path, backend="thread")
    made(tmp_path, backend="auto").close()
    made(tmp_path, backend="threads").close()
    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "memory_under", lambda folder: "tmpfs")
        with pytest.raises(NvmeError, match="name a folder on a disk, or pass allow_memory=True"):
            zero_nvme.Slab(tmp_path)
        made(tmp_path).close()


@pytest.mark.advice(
    "with, or remove {}.slab* from all of them",
    "leave weights= out and pass block_bytes=",
    "{}); remove {}.slab* there",
    "claim each extent once, before others",
)
def test_a_slab_with_a_name_is_opened_as_an_error_says(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    with made(folders, name="run", weights=[1, 1]) as store:
        with pytest.raises(NvmeError, match="close that one first, or choose another name"):
            made(folders, name="run")
        made(folders, name="run2", weights=[1, 1]).remove()
        extent = store.allocate(8192)
        with pytest.raises(ValueError, match="claim each extent once, before others are allocated"):
            store.claim(extent.offset_bytes, 8192)
    with pytest.raises(NvmeError, match="give all of them, in their order"):
        made(folders[::-1], name="run")
    with pytest.raises(ValueError, match="leave weights= out and pass block_bytes=4194304"):
        made(folders, name="run", weights=[1, 2])
    with made(folders, name="run", block_bytes=4194304) as store:
        store.claim(extent.offset_bytes, 8192)
    made(folders[0], name="other").close()
    with pytest.raises(NvmeError, match=r"give the folders that it was made with, or remove other\.slab\* from all"):
        made(folders, name="other")
    made(folders[0], name="other").close()
    (folders[0] / "other.slab.json").write_text("{")
    with pytest.raises(NvmeError, match=r"remove other\.slab\* there"):
        made(folders[0], name="other")
    for path in folders[0].glob("other.slab*"):
        path.unlink()
    made(folders, name="other", weights=[1, 1]).remove()


def test_backends_that_do_not_work_are_left_out(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(io_queue, "attempt", lambda *_, **__: "it fails")
        with pytest.raises(zero_nvme.BackendUnavailable, match="leave backend and direct out to take what works"):
            made(tmp_path, backend="threads")
    made(tmp_path).close()
    with pytest.raises(zero_nvme.BackendUnavailable, match="aiofiles cannot do O_DIRECT; leave direct out"):
        made(tmp_path, backend="aiofiles", direct=True)
    made(tmp_path, backend="aiofiles").close()


def test_requests_have_memory_and_are_waited_for(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    with made(tmp_path) as store:
        store.reserve(8192)
        extent = store.allocate(8192)
        with pytest.raises(TypeError, match="has no CPU address; copy it to CPU memory first"):
            store.write(extent, torch.empty(8192, dtype=torch.uint8, device="meta"))
        ticket = store.write(extent, torch.zeros(8192, dtype=torch.uint8))
        with monkeypatch.context() as patch:
            patch.setattr(type(ticket), "done", lambda self: False)  # as before it is complete
            with pytest.raises(ValueError, match=r"wait\(\) for it first"):
                ticket.exception()
        ticket.wait()
        assert ticket.exception() is None


def test_a_child_opens_its_own_slab(tmp_path):
    with made(tmp_path) as store:
        store.reserve(4096)
        extent = store.allocate(4096)
        if not (child := os.fork()):
            try:
                store.write(extent, bytearray(4096))
            except zero_nvme.ForkedError as error:
                with made(tmp_path, backend="threads") as own:
                    own.reserve(4096)
                    own.write(own.allocate(4096), bytearray(4096)).wait()
                os._exit(0 if "open another one here" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert filesystem.mount_of(str(tmp_path)).filesystem


def test_a_folder_in_memory_is_changed_for_one_on_a_disk(tmp_path):
    if filesystem.mount_of("/dev/shm").filesystem not in filesystem.IN_MEMORY:
        pytest.skip("/dev/shm is not in memory here")
    if filesystem.mount_of(str(tmp_path)).filesystem in filesystem.IN_MEMORY:
        pytest.skip("the temporary folder is in memory here")
    found = {subject: (state, text) for state, subject, text in doctor.examine("/dev/shm")}
    assert found["filesystem"][0] == "no" and "name a folder on a disk" in found["filesystem"][1]
    found = {subject: state for state, subject, _ in doctor.examine(str(tmp_path))}
    assert found["filesystem"] == "ok"


@pytest.mark.advice("name another backend, or lower depth")
def test_a_backend_gets_less_depth_or_is_another(tmp_path, monkeypatch):
    """Linux AIO counts the depth of all files against a limit of the machine's, here with 17 files."""
    folders, options = [tmp_path] * 17, {"depth": 4096, "weights": [1] * 17}
    if io_queue.attempt([str(tmp_path)], zero_nvme.Options(backend="libaio", direct=False)):
        pytest.skip("libaio does not work here")
    with monkeypatch.context() as patch:
        patch.setattr(io_queue, "attempt", lambda *_, **__: None)  # others took the room after that
        try:
            made(folders, backend="libaio", **options).close()
        except zero_nvme.BackendUnavailable as error:
            assert "io_setup: EAGAIN; name another backend, or lower depth" in str(error)
        else:
            pytest.skip("this machine has room for 70 thousand requests of Linux AIO")
    for way in ({"backend": "threads"}, {"backend": "libaio", "depth": 16}):
        made(folders, **options | way).close()


@pytest.mark.parametrize("way", [lambda store, taken: store.reserve(16384), lambda store, taken: store.free(taken)])
def test_a_slab_without_room_reserves_more_or_frees_an_extent(tmp_path, way):
    with made(tmp_path) as store:
        store.reserve(8192)
        taken = store.allocate(8192)
        with pytest.raises(NvmeError, match=r"reserve\(\) more, or free extents first"):
            store._extents.allocate(8192)  # allocate() of the slab itself reserves more
        way(store, taken)
        store._extents.allocate(8192)

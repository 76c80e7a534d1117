"""What a machine may not allow: io_uring, locked memory, direct I/O, writing."""

import errno
import os

import pytest

import zero_nvme
from tests.integration.zero_nvme.faults import DENY, run_python, skip_if_told
from zero_nvme.io import io_queue

pytestmark = pytest.mark.promise("slab-refusals")

REPORT = """
import sys, zero_nvme
with zero_nvme.Slab(sys.argv[1], backend="auto") as slab:
    extent = slab.allocate(100000)
    slab.write(extent, bytes(range(250)) * 400).wait()
    back = bytearray(100000)
    slab.read(extent, back).wait()
    assert back == bytes(range(250)) * 400
    print(slab.backend, "|", slab.reason)
try:
    zero_nvme.Slab(sys.argv[1], backend="io_uring")
except zero_nvme.BackendUnavailable as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("denied", "told"),
    [
        ("[425]", "libaio | io_uring_setup: EPERM"),  # as in a container
        ("[425, 206], 38", "threads | io_uring_setup: ENOSYS; io_setup: ENOSYS"),
        ("[426]", "libaio | io_uring: EPERM"),  # a ring that can be made and not entered
        ("[425, 208]", "threads | io_uring_setup: EPERM; io_getevents: EPERM"),  # completions that may not be seen
    ],
)
def test_auto_takes_what_is_allowed_and_says_why(tmp_path, denied, told):
    """Breaks if the probe does not move bytes, or waits for ever. The backend that was named is an error."""
    output = run_python(DENY + f"deny({denied})\n" + REPORT, str(tmp_path))
    skip_if_told(output)
    first, named = output.splitlines()
    assert first.startswith(told)
    assert "backend=io_uring does not work" in named


@pytest.mark.advice("name another backend, or lower depth")
def test_a_backend_gets_less_depth_or_is_another(tmp_path, monkeypatch):
    """Linux AIO counts the depth of all files against a limit of the machine's, here with 17 files."""
    folders, options = [tmp_path] * 17, {"depth": 4096, "weights": [1] * 17, "allow_memory": True}
    if io_queue.attempt([str(tmp_path)], zero_nvme.Options(backend="libaio", direct=False)):
        pytest.skip("libaio does not work here")
    with monkeypatch.context() as patch:
        patch.setattr(io_queue, "attempt", lambda *_, **__: None)  # others took the room after that
        try:
            zero_nvme.Slab(folders, backend="libaio", **options).close()
        except zero_nvme.BackendUnavailable as error:
            assert "io_setup: EAGAIN; name another backend, or lower depth" in str(error)
        else:
            pytest.skip("this machine has room for 70 thousand requests of Linux AIO")
    for way in ({"backend": "threads"}, {"backend": "libaio", "depth": 16}):
        zero_nvme.Slab(folders, **options | way).close()


@pytest.mark.parametrize("kind", ["missing", "a file", "read-only"])
def test_folders_that_cannot_be_used(tmp_path, kind):
    folder = tmp_path / "folder"
    expected = {"missing": errno.ENOENT, "a file": errno.ENOTDIR, "read-only": errno.EROFS}[kind]
    if kind == "a file":
        folder.write_text("")
    if kind == "read-only":
        folder = "/proc/sys"
        expected = None  # which one depends on the container
    with pytest.raises(zero_nvme.NvmeError) as caught:
        zero_nvme.Slab(folder)
    assert expected is None or caught.value.errno == expected
    assert str(folder) in str(caught.value)


def test_direct_io_refused(tmp_path):
    """proc takes no O_DIRECT: None degrades with a reason, True is an error."""
    name = "/proc/self/stat"
    try:
        os.close(os.open(name, os.O_RDONLY | os.O_DIRECT))
        pytest.skip("this kernel opens proc files with O_DIRECT")
    except OSError:
        pass
    with zero_nvme.File(name) as file:
        assert not file.direct and file.reason.startswith(f"open O_DIRECT in {name}: EINVAL")
    with pytest.raises(zero_nvme.BackendUnavailable, match="O_DIRECT"):
        zero_nvme.File(name, direct=True)

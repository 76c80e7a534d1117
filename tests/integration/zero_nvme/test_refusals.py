"""What a machine may not allow: io_uring, locked memory, direct I/O, writing; and folders that are memory."""

from __future__ import annotations

import errno
import os

import pytest

import zero_nvme
from tests.integration.zero_nvme.faults import DENY, run_python, skip_if_told

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


def test_io_uring_denied(tmp_path):
    """As in a container: auto takes the next one and says why, the named one is an error."""
    output = run_python(DENY + "deny([425])\n" + REPORT, str(tmp_path))
    skip_if_told(output)
    first, named = output.splitlines()
    assert first == "libaio | io_uring_setup: EPERM"
    assert "backend=io_uring does not work" in named and "io_uring_setup: EPERM" in named


def test_all_asynchronous_calls_denied(tmp_path):
    output = run_python(DENY + "deny([425, 206], 38)\n" + REPORT, str(tmp_path))
    skip_if_told(output)
    assert output.splitlines()[0] == "threads | io_uring_setup: ENOSYS; io_setup: ENOSYS"


def test_submission_denied_after_setup(tmp_path):
    """The probe moves bytes, so a ring that can be made and not entered is found out."""
    output = run_python(DENY + "deny([426])\n" + REPORT, str(tmp_path))
    skip_if_told(output)
    assert output.splitlines()[0].startswith("libaio | io_uring: EPERM")


def test_completions_of_libaio_denied(tmp_path):
    """Breaks if the probe waits for ever for what it may not see."""
    output = run_python(DENY + "deny([425, 208])\n" + REPORT, str(tmp_path))
    skip_if_told(output)
    assert output.splitlines()[0] == "threads | io_uring_setup: EPERM; io_getevents: EPERM"


def test_folder_in_memory(tmp_path):
    if zero_nvme.filesystem.filesystem_name("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is not tmpfs here")
    with pytest.raises(zero_nvme.NvmeError, match="/dev/shm is on tmpfs, which is memory") as caught:
        zero_nvme.Slab("/dev/shm")
    assert caught.value.errno == errno.EINVAL and caught.value.path == "/dev/shm"


@pytest.mark.parametrize("backend", zero_nvme.BACKENDS)
def test_folder_in_memory_when_that_is_wanted(backend):
    if zero_nvme.filesystem.filesystem_name("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is not tmpfs here")
    with zero_nvme.Slab("/dev/shm", backend=backend, allow_memory=True) as slab:
        extent = slab.allocate(100_000)
        slab.write(extent, b"memory" * 10, 7777).wait()
        back = bytearray(60)
        slab.read(extent, back, 7777).wait()
        assert back == b"memory" * 10 and slab.backend == backend


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

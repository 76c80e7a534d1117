"""A filesystem that fills up: found early by reserve(), and reported by the request it hits otherwise."""

import errno
import os

import pytest

import zero_nvme
from tests.integration.zero_nvme.faults import small_ext4

pytestmark = pytest.mark.promise("slab-full-disk")

BACKENDS = zero_nvme.BACKENDS


def test_reserve_says_so_before_anything_is_written(tmp_path):
    with small_ext4(tmp_path, 32 << 20) as mount, zero_nvme.Slab(mount) as slab:
        free = os.statvfs(mount).f_bfree
        with pytest.raises(zero_nvme.NvmeError) as caught:
            slab.reserve(64 << 20)
        error = caught.value
        assert (error.errno, error.path, error.wanted) == (errno.ENOSPC, str(mount), 64 << 20)
        assert 0 < error.got < 32 << 20 and "free space there" in str(error)
        assert os.statvfs(mount).f_bfree == free
        slab.reserve(1 << 20)  # still usable
        with pytest.raises(zero_nvme.NvmeError, match="ENOSPC"):
            zero_nvme.Slab(mount, capacity_bytes=64 << 20)


@pytest.mark.parametrize("backend", BACKENDS)
def test_full_in_mid_write(tmp_path, backend):
    """The write that hits it fails with path and offset, those before and after it succeed, the file stays usable."""
    with small_ext4(tmp_path, 32 << 20) as mount:
        block = 1 << 20
        data = zero_nvme.empty(block)
        data[:] = os.urandom(block)
        name = mount / "file"
        with zero_nvme.File(name, "w", backend, block_bytes=block, inflight_bytes=block) as file:
            file.reserve(2 * block)
            tickets = [file.write(data, index * block) for index in range(64)]
            file.drain()
            errors = [ticket.exception() for ticket in tickets]
            assert errors[0] is errors[1] is None
            failed = [error for error in errors if error is not None]
            assert failed and all(error.errno == errno.ENOSPC for error in failed)
            assert all(error.path == str(name) and error.offset >= 2 * block for error in failed)
            back = zero_nvme.empty(block)
            file.read(back).wait()
            assert back == data
            file.write(data[:4096]).wait()
            assert file.stats()["write"]["failures"] == len(failed)

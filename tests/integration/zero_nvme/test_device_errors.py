"""Devices that fail, files that are cut, bits that flip: the request that is hit says so, the others complete."""

import errno
import os
import pathlib

import pytest

import zero_nvme
from tests.conformance.zero_nvme.suites import read, written
from tests.integration.zero_nvme.faults import loop_device, small_zram

pytestmark = pytest.mark.promise("slab-device-errors")

MIB = 1 << 20
NATIVE = [name for name in zero_nvme.BACKENDS if name != "aiofiles"]


@pytest.mark.parametrize("backend", zero_nvme.BACKENDS)
def test_read_error(tmp_path, backend):
    """A loop device over a file that was truncated underneath returns EIO for what is gone."""
    image = tmp_path / "image"
    data = os.urandom(8 * MIB)
    image.write_bytes(data)
    with loop_device(image) as device, zero_nvme.File(device, "r", backend, block_bytes=MIB) as file:
        assert file.size == 8 * MIB
        os.truncate(image, 4 * MIB)
        back = [zero_nvme.empty(MIB) for _ in range(8)]
        tickets = [file.read(piece, index * MIB) for index, piece in enumerate(back)]
        for index, ticket in enumerate(tickets):
            if index < 4:
                ticket.wait()
                assert back[index] == data[index * MIB : (index + 1) * MIB]
            else:
                with pytest.raises(zero_nvme.NvmeError) as caught:
                    ticket.wait()
                assert (caught.value.errno, caught.value.path) == (errno.EIO, device)
                assert caught.value.offset == index * MIB and caught.value.wanted == MIB
        again = bytearray(MIB)
        file.read(again).wait()
        assert again == data[:MIB]


@pytest.mark.parametrize("backend", NATIVE)
def test_write_error(backend):
    """A zram device at its memory limit fails writes of what does not compress."""
    with small_zram(16 * MIB, 4 * MIB) as device:
        with zero_nvme.File(device, "r+", backend, block_bytes=MIB, inflight_bytes=MIB) as file:
            data = zero_nvme.empty(MIB)
            data[:] = os.urandom(MIB)
            tickets = [file.write(data, index * MIB) for index in range(16)]
            file.drain()
            errors = [ticket.exception() for ticket in tickets]
            assert errors[0] is None
            assert errors[-1] is not None and errors[-1].errno in (errno.EIO, errno.ENOMEM, errno.ENOSPC)
            assert errors[-1].offset >= 15 * MIB and errors[-1].path == device
            back = zero_nvme.empty(MIB)
            file.read(back).wait()
            assert back == data


@pytest.mark.parametrize("backend", ["threads", "aiofiles"])
def test_write_error_behind_the_page_cache(backend):
    """The write succeeds into memory; sync() raises what the device said, and the file stays usable."""
    with small_zram(16 * MIB, 4 * MIB) as device:
        with zero_nvme.File(device, "r+", backend, direct=False, block_bytes=MIB) as file:
            data = os.urandom(MIB)
            zero_nvme.wait_all([file.write(data, index * MIB) for index in range(16)])
            with pytest.raises(zero_nvme.NvmeError, match=f"fsync {device}") as caught:
                file.sync()
            assert caught.value.errno in (errno.EIO, errno.ENOMEM, errno.ENOSPC) and caught.value.path == device
            back = bytearray(MIB)
            file.read(back).wait()
            assert back == data


@pytest.mark.parametrize("backend", zero_nvme.BACKENDS)
def test_flipped_bit(tmp_path, backend):
    """The checksum names the extent and the chunk; other extents still read."""
    with zero_nvme.Slab(tmp_path, 8 * MIB, backend, checksum=True) as slab:
        data = os.urandom(2 * MIB)
        extents = [written(slab, data) for _ in range(2)]
        where = extents[1].offset_bytes + MIB + 12345
        mine, *_ = [link for link in pathlib.Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(link)]
        fd = os.open(mine, os.O_RDWR)
        os.pwrite(fd, bytes([data[MIB + 12345] ^ 16]), where)
        os.fsync(fd)
        os.close(fd)
        assert read(slab, extents[0]) == data
        ticket = slab.read(extents[1], bytearray(2 * MIB))
        for _ in range(2):
            with pytest.raises(zero_nvme.ChecksumError, match="chunk 1") as caught:
                ticket.wait()
            assert str(extents[1]) in str(caught.value)
        slab.read(extents[1], bytearray(MIB)).wait()  # its first chunk is sound
        slab.write(extents[1], data).wait()
        assert read(slab, extents[1]) == data
        slab.write(extents[0], b"abcd", 5).wait()  # a part of a chunk: not verified from now on, and not refused
        assert read(slab, extents[0]) == data[:5] + b"abcd" + data[9:]

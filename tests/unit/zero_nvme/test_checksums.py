"""The checksum in use, and zlib's in its place: every flipped bit, every swap of words, every length."""

import random

import pytest

from zero_nvme.buffers import as_memory
from zero_nvme.errors import ChecksumError
from zero_nvme.extents import Extent
from zero_nvme.files import checksums
from zero_nvme.files.checksums import CHUNK_BYTES, Checksums


@pytest.fixture(params=["in use", "zlib"])
def checksum(request):
    function = checksums.checksum if request.param == "in use" else checksums.by_zlib

    def of(data):
        memory = as_memory(data, writable=False)
        return tuple(function(memory.address, memory.nbytes))

    return of


@pytest.mark.parametrize("nbytes", [1, 7, 8, 31, 32, 33, 100])
def test_every_flipped_bit_is_seen(checksum, nbytes):
    data = bytearray(random.Random(nbytes).randbytes(nbytes))
    whole = checksum(data)
    assert checksum(bytes(data)) == whole
    for bit in range(8 * nbytes):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(data) != whole
        data[bit // 8] ^= 1 << bit % 8


def test_chunks_that_a_range_covers_whole():
    """Fails if a read misses a damaged chunk that it covers, or compares one of which it has only a part."""
    end = 2 * CHUNK_BYTES + 10
    assert damage_seen(0, end) == [0, 1, 2]
    assert damage_seen(1, end - 1) == [1, 2]
    assert damage_seen(0, end - 1) == [0, 1]
    assert damage_seen(CHUNK_BYTES + 1, CHUNK_BYTES) == []


def damage_seen(offset, nbytes):
    """The chunks of 2 MiB and 10 bytes whose damage a read of `nbytes` from `offset` on reports."""
    seen, extent = [], Extent(0, 2 * CHUNK_BYTES + 10)
    for chunk in range(3):
        sums, data = Checksums(), bytearray(random.Random(0).randbytes(extent.nbytes))
        sums.observe(True, extent, 0, as_memory(data, writable=False))
        data[chunk * CHUNK_BYTES + 9] ^= 1
        part = memoryview(data)[offset : offset + nbytes]
        verify = sums.observe(False, extent, offset, as_memory(part, writable=False))
        try:
            _ = verify and verify()
        except ChecksumError as error:
            assert f"chunk {chunk}," in str(error)
            seen.append(chunk)
    return seen

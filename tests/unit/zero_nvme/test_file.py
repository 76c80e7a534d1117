"""Named files: modes, ranges past the end, and room that is reserved."""

import errno
import os

import pytest

from zero_nvme import File, NvmeError


@pytest.mark.advice("mode 'w' creates it")
def test_modes(tmp_path):
    name = tmp_path / "file"
    with pytest.raises(NvmeError, match="does not exist.*mode 'w' creates it") as missing:
        File(name)
    assert missing.value.errno == errno.ENOENT
    for mode in ("x", "w", "r"):
        File(name, mode).close()
    with pytest.raises(NvmeError) as exists:
        File(name, "x")
    assert exists.value.errno == errno.EEXIST
    with File(name) as file, pytest.raises(ValueError, match="mode 'r'.*open it with 'r\\+' to write"):
        file.write(b"x")
    with File(name, "r+") as file:
        file.write(b"x").wait()
    with pytest.raises(ValueError, match="does not exist; choose one of"):
        File(name, "rw")


def test_past_the_end(tmp_path):
    name = tmp_path / "file"
    name.write_bytes(bytes(5000))
    with File(name) as file:
        with pytest.raises(NvmeError, match="has 5000 bytes") as caught:
            file.read(bytearray(1001), 4000)
        assert (caught.value.offset, caught.value.wanted, caught.value.got) == (4000, 1001, 1000)


@pytest.mark.parametrize("direct", [None, False])
def test_reserved_room_is_there_and_given_back_where_nothing_was_written(tmp_path, direct):
    name = tmp_path / "file"
    with File(name, "w", direct=direct) as file:
        file.reserve(1 << 20)
        assert os.stat(name).st_blocks * 512 >= 1 << 20
        file.write(b"abc").wait()
        file.sync()
    assert name.read_bytes() == b"abc"
    with File(name, "r+", direct=direct) as file, pytest.raises(NvmeError) as caught:
        file.reserve(1 << 55)
    assert caught.value.errno == errno.ENOSPC

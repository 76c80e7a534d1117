"""The files of a checkpoint are written past the page cache, or through it where the filesystem cannot."""

import errno
import fcntl
import os

import pytest

from zero_core.checkpoint import files


def written(path, *parts):
    with files._Uncached(path) as file:
        for part in parts:
            assert file.write(part) == len(part)
        assert file.tell() == sum(map(len, parts))
        file.sync()
    return path.read_bytes()


PARTS = (b"", os.urandom(3), os.urandom(files._BLOCK_BYTES), os.urandom(files._COPIED_BYTES + 4097), os.urandom(1))


def test_parts_of_any_length_are_in_the_file(tmp_path):
    assert written(tmp_path / "a", *PARTS) == b"".join(PARTS)
    assert written(tmp_path / "whole", PARTS[2]) == PARTS[2]
    assert written(tmp_path / "empty") == b""


@pytest.mark.parametrize("when", ["asked", "written"])
def test_a_filesystem_that_has_no_direct_io_is_written_through_the_cache(when, tmp_path, monkeypatch):
    """It refuses the flag, or takes it and does not write so. Fails if it is not asked."""
    refused = []

    def asked(fd, command, *flags):
        if command == fcntl.F_SETFL and flags[0] & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "no direct I/O here")
        return found[0](fd, command, *flags)

    def written_so(fd, block):
        if found[0](fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not so")
        return found[1](fd, block)

    found = fcntl.fcntl, os.write
    if when == "asked":
        monkeypatch.setattr(files.fcntl, "fcntl", asked)
    else:
        monkeypatch.setattr(files.os, "write", written_so)
    assert written(tmp_path / "a", *PARTS) == b"".join(PARTS)
    assert when == "written" or refused


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EINVAL])
def test_other_errors_are_raised(tmp_path, monkeypatch, code):
    """Also the one of a filesystem without direct I/O, where it comes again through the cache."""

    def full(fd, block):
        raise OSError(code, "full")

    monkeypatch.setattr(files.os, "write", full)
    with pytest.raises(OSError, match="full"), files._Uncached(tmp_path / "a") as file:
        file.write(PARTS[2])

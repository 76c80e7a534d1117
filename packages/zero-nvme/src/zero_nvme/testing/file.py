"""Tests the rules of a named file, for every backend."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_nvme import File, NvmeError
from zero_nvme.testing.material import BLOCK, PAGE, random_bytes


class FileSuite:
    """Tests the promises of `File` on one backend. A subclass gives the fixture `open_file`."""

    @pytest.fixture
    def open_file(self) -> Callable[..., File]:
        """Takes the parameters of File, with `backend` filled in."""
        raise NotImplementedError("a subclass gives this fixture")

    def test_size_is_what_was_written(self, open_file: Callable[..., File], tmp_path: Path) -> None:
        """Breaks if the padding of direct I/O stays, or a tail overwrites bytes before it."""
        name = tmp_path / "file"
        data = random_bytes(3 * PAGE + 100)
        with open_file(name, "w") as file:
            for start, stop in [(0, 5000), (5000, 5003), (5003, len(data))]:
                file.write(data[start:stop], start).wait()
            file.sync()
            assert name.stat().st_size == file.size == len(data)
        assert name.read_bytes() == data
        with open_file(name) as file:
            back = bytearray(len(data))
            assert file.read(back).result() == len(data)
            assert bytes(back) == data
            tail = bytearray(7)
            file.read(tail, len(data) - 7).wait()
            assert bytes(tail) == data[-7:]

    def test_truncated_underneath(self, open_file: Callable[..., File], tmp_path: Path) -> None:
        """Breaks if a short read passes for a whole one; the ticket has path, offset, wanted and got."""
        name = tmp_path / "file"
        size = 4 * BLOCK
        name.write_bytes(random_bytes(size))
        with open_file(name, "r+", block_bytes=BLOCK) as file:
            os.truncate(name, BLOCK + 1000)
            back, others = bytearray(size), [bytearray(BLOCK) for _ in range(4)]
            tickets = [file.read(others[0]), file.read(back), *(file.read(other) for other in others[1:])]
            with pytest.raises(NvmeError, match="ends early") as caught:
                tickets[1].wait()
            error = caught.value
            assert error.errno == errno.ENODATA and error.path == str(name)
            assert error.offset is not None and error.offset >= BLOCK
            assert error.wanted is not None and error.got is not None and error.got < error.wanted
            for ticket, other in zip([tickets[0], *tickets[2:]], others, strict=True):
                ticket.wait()  # the others are unharmed
                assert bytes(other) == random_bytes(size)[:BLOCK]
            head = bytearray(BLOCK)
            file.read(head).wait()  # and the file stays usable
            assert bytes(head) == random_bytes(size)[:BLOCK]
            assert file.stats()["read"]["failures"] > 0

"""`FreedMemory`: freed memory stays with the process until it has grown by twice what a piece of work leaves."""

import io
import os

from zero_core import heap

MIB = 1 << 20


def begin(monkeypatch, resident: list[int]) -> list[bool]:
    """For each piece that begins with so many MiB resident: whether memory is returned, which frees 10 MiB."""
    freed, returned = heap.FreedMemory(), []
    for mib in resident:
        found = [mib, mib - 10]

        def opened(path: str, mode: str, found: list[int] = found) -> io.BytesIO:
            assert path == "/proc/self/statm"
            resident = found.pop(0) if found[1:] else found[0]
            return io.BytesIO(b"999999 %d 77 1 0 8 0\n" % (resident * MIB // os.sysconf("SC_PAGE_SIZE")))

        monkeypatch.setattr("builtins.open", opened)
        calls = []
        monkeypatch.setattr(heap, "give_back_freed_memory", lambda calls=calls: calls.append(1))
        freed.begin()
        returned.append(bool(calls))
    return returned


def test_memory_is_returned_once_the_process_has_grown_by_two_pieces(monkeypatch):
    """The first piece begins at 90 MiB and leaves 30: 150 may stay. Then it begins at 141, and leaves 60."""
    assert begin(monkeypatch, [100, 120, 150, 140, 151, 201, 261, 262]) == [1, 0, 0, 0, 1, 0, 0, 1]


def test_a_first_piece_that_left_too_much_is_not_believed_for_ever(monkeypatch):
    """The first piece leaves 910 MiB, so nothing is above the bound; after 64 pieces memory is returned even so."""
    assert begin(monkeypatch, [100, 1000, *[500] * 63]) == [1, *[0] * 63, 1]


def test_without_proc_memory_is_returned_every_64_pieces(monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(FileNotFoundError))
    calls = []
    monkeypatch.setattr(heap, "give_back_freed_memory", lambda: calls.append(1))
    freed = heap.FreedMemory()
    for _ in range(65):
        freed.begin()
    assert calls == [1, 1]

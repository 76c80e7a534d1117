"""`FreedMemory`: freed memory stays with the process until it has grown by twice what a piece of work leaves."""

import ctypes

import pytest
import torch

from zero_core import heap

MIB = 1 << 20


def begin(monkeypatch, resident: list[int]) -> list[bool]:
    """For each piece that begins with so many MiB resident: whether memory is returned, which frees 10 MiB."""
    freed, returned = heap.FreedMemory(), []
    for mib in resident:
        found = [mib, mib - 10]
        monkeypatch.setattr(
            heap, "_resident_bytes", lambda found=found: (found.pop(0) if found[1:] else found[0]) * MIB
        )
        calls = []
        monkeypatch.setattr(heap, "give_back_freed_memory", lambda calls=calls: calls.append(1))
        freed.begin()
        returned.append(bool(calls))
    return returned


def test_memory_is_returned_once_the_process_has_grown_by_two_pieces(monkeypatch):
    """The first piece begins at 90 MiB and leaves 30: 150 may stay. Then it begins at 141, and leaves 60."""
    assert begin(monkeypatch, [100, 120, 150, 140, 151, 201, 261, 262]) == [1, 0, 0, 0, 1, 0, 0, 1]


def test_a_piece_that_leaves_nothing_may_leave_two_mib(monkeypatch):
    assert begin(monkeypatch, [100, 90, 92, 93]) == [1, 0, 0, 1]


def test_without_proc_memory_is_returned_once(monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(FileNotFoundError))
    assert heap._resident_bytes() == 0
    calls = []
    monkeypatch.setattr(heap, "give_back_freed_memory", lambda: calls.append(1))
    freed = heap.FreedMemory()
    for _ in range(5):
        freed.begin()
    assert calls == [1]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_resident_bytes_follow_what_is_touched_and_returned():
    before = heap._resident_bytes()
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    assert heap._resident_bytes() - before >= 60 * MIB
    del held
    heap.give_back_freed_memory()
    assert heap._resident_bytes() - before < 40 * MIB

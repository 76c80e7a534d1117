"""`transfers`: who may ask what about requests in flight, and what becomes of those that failed."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zero_offload import MemoryByteStore
from zero_offload.errors import SwapError
from zero_offload.testing import FaultyByteStore
from zero_offload.timeline import Timeline
from zero_offload.transfers import InFlight, Transfers


class Copy:
    """A mark of a stream, over when it is said to be."""

    over = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


def test_a_place_knows_what_reads_and_writes_which_of_its_bytes() -> None:
    """Fails if ranges that only touch count as overlapping, or if a reader counts as a writer."""
    in_flight, read, write = InFlight(Timeline()), Copy(), Copy()
    in_flight.begin(read, "slot", 0, 10, writes=False)
    in_flight.begin(write, "slot", 10, 20, writes=True)
    assert in_flight.of("slot") == [read, write] and in_flight.of("another slot") == []
    assert in_flight.of("slot", 0, 10) == [read] and in_flight.of("slot", 9, 11) == [read, write]
    assert in_flight.of("slot", writes=True) == [write] and in_flight.of("slot", 0, 10, writes=True) == []
    in_flight.wait([read])
    assert read.over and in_flight.of("slot") == [write]
    in_flight.forget("slot")
    assert in_flight.of("slot") == [] and not write.over


def test_a_copy_stands_for_those_before_it_of_the_same_bytes() -> None:
    """Fails if copies pile up where nobody waits for them, as in evaluation, or if a copy hides one of other bytes."""
    in_flight, first, other, last = InFlight(Timeline()), Copy(), Copy(), Copy()
    in_flight.begin(first, "unit", writes=False)
    in_flight.begin(other, "unit", 0, 4, writes=False)
    in_flight.begin(last, "unit", writes=False)
    assert in_flight.of("unit") == [other, last]


def test_a_read_waits_for_writes_of_its_own_bytes_alone() -> None:
    """Requests happen when they are waited for. Fails if a read waits for other bytes, or overtakes a write."""
    lazy = FaultyByteStore(MemoryByteStore(), lazy=True)
    stored = Transfers(lazy, InFlight(Timeline())).allocate(8192)
    values = torch.arange(8192, dtype=torch.int64).to(torch.uint8)
    in_flight, found = stored.transfers.in_flight, torch.empty(8192, dtype=torch.uint8)
    first = stored.write(values[:4096], "the first half")
    second = stored.write(values[4096:], "the second half", 4096)
    in_flight.wait([stored.read(found[:4096], "the first half")])
    assert first not in in_flight.of(stored) and in_flight.of(stored) == [second]
    in_flight.wait([stored.read(found[4096:], "the second half", 4096)])
    assert torch.equal(found, values) and in_flight.of(stored) == []


def test_an_error_stays_with_the_bytes_until_their_room_is_given_back() -> None:
    """Fails if a failed write is forgotten, or if polling raises what others are to be told."""
    faulty = FaultyByteStore(MemoryByteStore())
    in_flight = InFlight(Timeline())
    stored = Transfers(faulty, in_flight).allocate(4096)
    faulty.fail("write")
    stored.write(torch.zeros(4096, dtype=torch.uint8), "states")
    in_flight.drain()
    assert not in_flight.poll()
    for _ in range(2):
        with pytest.raises(SwapError, match="writing states failed"):
            stored.read(torch.zeros(4096, dtype=torch.uint8), "states")
    stored.free()
    assert in_flight.of(stored) == []


def test_memory_lives_while_it_is_in_flight_and_no_longer() -> None:
    """Fails if a buffer may be freed under its write, or if the record keeps it afterwards."""
    extent: Any = SimpleNamespace(nbytes=4096, offset_bytes=0)
    disk: Any = SimpleNamespace(alignment=1, allocate=lambda nbytes: extent, write=lambda *request: Copy())
    transfers = Transfers(disk, InFlight(Timeline()))
    stored, buffer = transfers.allocate(4096), torch.zeros(4096, dtype=torch.uint8)
    seen = weakref.ref(buffer)
    stored.write(buffer, "states")
    del buffer
    gc.collect()
    assert seen() is not None
    stored.drain()
    gc.collect()
    assert seen() is None
    assert transfers.write_bytes == 4096 and transfers.read_bytes == 0
    assert [event.nbytes for event in transfers.in_flight.timeline.events()] == [4096]

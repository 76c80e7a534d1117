"""`transfers`: who may ask what about requests in flight, and what becomes of those that failed."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import torch

from zero_offload.memory.transfers import InFlight, Transfers
from zero_offload.timeline import Timeline


class Copy:
    """A mark of a stream, over when it is said to be."""

    over = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


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
    assert transfers.moved("swap_out") == 4096 and transfers.moved("swap_in") == 0
    assert [event.nbytes for event in transfers.in_flight.timeline.events()] == [4096]


def test_after_drain_every_transfer_has_ended_though_one_has_failed() -> None:
    class Failing(Copy):
        def wait(self) -> None:
            super().wait()
            raise OSError("the disk is away")

    requests = [Failing(), Copy()]
    submitted = iter(requests)
    disk: Any = SimpleNamespace(alignment=1, allocate=lambda nbytes: None, write=lambda *_: next(submitted))
    transfers = Transfers(disk, InFlight(Timeline()))
    for _ in requests:
        transfers.allocate(8).write(torch.zeros(8, dtype=torch.uint8), "states")
    transfers.in_flight.drain()
    assert all(request.over for request in requests)

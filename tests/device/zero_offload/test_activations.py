"""Activations set aside beside a device: the training thread runs ahead of the device, and what comes back is right."""

import time
from collections.abc import Iterator

import pytest
import torch

from zero_offload import MemoryByteStore, Timeline
from zero_offload.activations.spill import LEAVING, HostSpill
from zero_offload.activations.stored_spill import QueuedSpill
from zero_offload.memory.transfers import InFlight, Transfers
from zero_offload.streams import Streams


@pytest.fixture
def streams(device: torch.device) -> Iterator[Streams]:
    made = Streams(device, torch.empty(0, dtype=torch.uint8))
    yield made
    made.close()


def queued(streams: Streams, slots: int) -> QueuedSpill:
    return QueuedSpill(Transfers(MemoryByteStore(), InFlight(Timeline())), streams, slots=slots, piece_bytes=1 << 14)


@pytest.mark.promise("device-activations-nvme")
def test_packing_waits_for_no_kernel(device: torch.device, streams: Streams) -> None:
    """Fails if the host waits for kernels or copies when it sets a tensor aside, or a copy comes before its values.

    Six tensors of two pieces each, so that slots, extents and device memory are used again.
    """
    module = torch.get_device_module(device)
    spill = queued(streams, 3)
    for step in range(2):
        packed = []
        module._sleep(500_000_000)  # a fraction of a second, while which the host goes on
        for i in range(6):
            values = torch.ones(8000, device=device) + 100 * step + i
            computed = module.Event()
            computed.record(module.current_stream(device))
            packed.append(spill.pack(values, str(i)))
            assert i >= LEAVING or not computed.query()
            del values
        for i in reversed(range(6)):
            assert packed[i].load().eq(1 + 100 * step + i).all().item()
        del packed
    spill.close()


def test_a_buffer_is_free_after_the_copy_out_of_it(device: torch.device, streams: Streams) -> None:
    """Fails if host memory is given back, or used for another tensor, under a copy that still reads it.

    The two halves of the work run on streams that nobody has ordered: they share nothing but these buffers.
    """
    module = torch.get_device_module(device)
    spill = HostSpill(streams)
    first, second = module.Stream(device), module.Stream(device)
    seen = []
    for number, numel in enumerate([8000, 8000, 16000]):  # the same buffer, then another piece beside it
        with module.stream((first, second)[number % 2]):
            packed = spill.pack(torch.full((numel,), float(number), device=device), str(number))
            module._sleep(50_000_000)  # the copy up is still queued when the next one needs memory
            seen.append(packed.load())
            del packed
    assert spill.host_bytes == 4 * 16000
    module.synchronize(device)
    assert [each.unique().tolist() for each in seen] == [[0.0], [1.0], [2.0]]
    spill.close()


def test_what_was_brought_back_and_not_wanted_is_freed_after_its_copy(device: torch.device, streams: Streams) -> None:
    """Fails if device memory is used again under a copy into it: of a tensor that no backward asked for."""
    module = torch.get_device_module(device)
    spill = HostSpill(streams)
    unwanted = spill.pack(torch.zeros(8000, device=device), "unwanted")
    last = spill.pack(torch.ones(8000, device=device), "last")
    module._sleep(50_000_000)
    assert last.load().eq(1).all()  # begins to bring the other one
    module._sleep(50_000_000)
    del last, unwanted
    spill.pack(torch.ones(8000, device=device), "the next forward")
    others = [torch.full((8000,), 2.0, device=device) for _ in range(8)]
    module.synchronize(device)
    assert all(each.eq(2).all() for each in others)
    spill.close()


def test_closing_frees_device_memory_after_the_copies_into_it(device: torch.device, streams: Streams) -> None:
    """Fails if what comes back, though nobody asked for it, is freed for the next kernel while it is being written."""
    module = torch.get_device_module(device)
    spill = queued(streams, 2)
    unwanted, last = (spill.pack(torch.ones(8000, device=device), name) for name in ("unwanted", "last"))
    assert last.load().eq(1).all()  # asks for the other one
    deadline = time.monotonic() + 30
    while unwanted.arriving[0].copied is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    module._sleep(50_000_000)
    del unwanted, last
    spill.close()
    others = [torch.full((8000,), 2.0, device=device) for _ in range(8)]
    module.synchronize(device)
    assert all(each.eq(2).all() for each in others)

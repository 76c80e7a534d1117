"""Activations on nvme beside a device: the training thread runs ahead of the device, and what comes back is right."""

from __future__ import annotations

import torch

from zero_offload import MemoryByteStore, Timeline
from zero_offload.host_spill import LEAVING
from zero_offload.queued_spill import QueuedSpill
from zero_offload.streams import DeviceStreams
from zero_offload.tier import Nvme


def test_packing_waits_for_no_kernel(device: torch.device) -> None:
    """Fails if the host waits for kernels or copies when it sets a tensor aside, or a copy comes before its values.

    Six tensors of two pieces each, so that slots, extents and device memory are used again.
    """
    module = torch.get_device_module(device)
    streams = DeviceStreams(device, torch.empty(0, dtype=torch.uint8))
    spill = QueuedSpill(Nvme(MemoryByteStore(), Timeline()), streams, slots=3, piece_bytes=1 << 14)
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
    streams.close()

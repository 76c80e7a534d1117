"""`probe` beside a device: its copies come after what the caller's stream holds, and its figures are there."""

from __future__ import annotations

import pytest
import torch

from zero_offload.planning import probing_device


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing_device, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(probing_device, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(probing_device, "ROUNDS", 1)


def test_memory_that_queued_kernels_still_read_is_not_overwritten(device, needs_device, small) -> None:
    """Fails if a lane begins to copy before the caller's stream has come to where the probe took its memory."""
    needs_device("a stream")
    values = torch.full((1 << 20,), 7, dtype=torch.uint8, device=device)
    for _ in range(20):  # queued, and later than the probe's first copies
        total = values.sum()
    del values  # the allocator may give this memory to the probe
    figures = probing_device.device_figures(device)
    assert total.item() == 7 << 20
    assert all(figures[name] > 0 for name in ("device_gib", "device_gbps", "link_gbps", "link_out_gbps"))


def test_a_round_ends_when_its_copies_have(device, needs_device, small, monkeypatch) -> None:
    """Fails if the rate of the device's memory is that of queueing copies, and not of making them."""
    needs_device("a stream")
    module = torch.get_device_module(device)
    idle = []

    def once(work) -> float:
        module._sleep(50_000_000)
        work()
        idle.append(module.current_stream(device).query())
        return 1.0

    monkeypatch.setattr(probing_device, "best", once)
    probing_device.device_figures(device)
    assert idle[-1]  # the others copy on streams of their own

"""`probe` beside a device: its copies come after what the caller's stream holds, and its figures are there."""

import pytest
import torch

from zero_offload.planning import probing


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(probing, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(probing, "DEVICE_ROUNDS", 1)


@pytest.mark.promise("device-probe")
def test_memory_that_queued_kernels_still_read_is_not_overwritten(device, needs_device, small) -> None:
    """Fails if a lane begins to copy before the caller's stream has come to where the probe took its memory."""
    needs_device("a stream")
    values = torch.full((1 << 20,), 7, dtype=torch.uint8, device=device)
    for _ in range(20):  # queued, and later than the probe's first copies
        total = values.sum()
    del values  # the allocator may give this memory to the probe
    figures = probing.device_figures(device)
    assert total.item() == 7 << 20
    assert all(figures[name] > 0 for name in ("device_gib", "device_gbps", "link_gbps", "link_out_gbps"))


@pytest.mark.promise("device-room")
def test_a_reserve_has_what_others_hold_and_not_what_this_process_has_allocated(device, needs_device):
    """A simulated device has no context and no workspaces: there they are nothing."""
    needs_device("memory of its own")
    before = probing.device_reserves(device, torch.bfloat16)
    kept = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    after = probing.device_reserves(device, torch.bfloat16)
    assert after == pytest.approx(before, abs=0.02)
    del kept
    total = torch.get_device_module(device).mem_get_info(device)[1] / (1 << 30)
    assert sum(before.values()) >= 0.5 + 0.05 * total
    if device.type == "sim":
        assert (before["context"], before["workspaces"]) == (0, 0)

"""The detector sees what native code does with memory: each of these programs forgets one wait, and is reported."""

from typing import Any

import pytest
import torch

NUMEL = 1 << 16


@pytest.fixture
def sim(device):
    if device.type != "sim":
        pytest.skip(f"{device.type} has no race detector")
    return pytest.importorskip("zero_sim")


def reports(sim: Any) -> str:
    torch.accelerator.synchronize()
    return "\n".join(map(str, sim.take_races()))


@pytest.mark.races_expected
@pytest.mark.parametrize("writes", [False, True], ids=["read", "write"])
def test_a_file_and_a_copy_that_use_the_same_memory(device, sim, tmp_path, writes):
    """Read into memory that is copied before it has come; written from memory that a copy has not filled."""
    zero_nvme = pytest.importorskip("zero_nvme")
    values, told = torch.ones(NUMEL, device=device), f"zero_nvme {'writes' if writes else 'reads'} a file"
    with zero_nvme.Slab(tmp_path, allow_memory=True) as slab:
        extent = slab.allocate(4 * NUMEL)
        slab.write(extent, torch.ones(NUMEL)).wait()
        for waits in (True, False):
            host = torch.zeros(NUMEL, pin_memory=True)
            ticket = host.copy_(values, non_blocking=True) if writes else slab.read(extent, host)
            if waits:
                torch.accelerator.synchronize() if writes else ticket.wait()
            second = slab.write(extent, host) if writes else host.to(device, non_blocking=True)
            found = reports(sim)
            (second if writes else ticket).wait()
            assert (told in found) == (not waits), found


@pytest.mark.races_expected
@pytest.mark.parametrize("starts", [False, True], ids=["update", "start"])
def test_an_update_of_memory_that_is_still_copied_from(device, sim, starts):
    zero_optim_cpu = pytest.importorskip("zero_optim_cpu")
    from tests.unit.zero_optim_cpu.tiles import FP32, Segment, adamw, make_tile

    optimizer = adamw(lr=0.01)
    step = zero_optim_cpu.CpuStep("fp32", threads=1)
    step.bind(optimizer)
    for waits in (True, False):
        tile = make_tile(step, torch.randn(NUMEL), FP32)
        tile.gradient.zero_()
        tile.parameter = tile.parameter.pin_memory()
        there = tile.parameter.to(device, non_blocking=True)
        if waits:
            torch.accelerator.synchronize()
        segments = [Segment(0, NUMEL, optimizer.param_groups[0])]
        if starts:
            step.start(tile, segments, 1.0).wait()
        else:
            step.update(tile, segments, 1.0)
        found = reports(sim)
        assert ("CpuStep" in found) == (not waits), found
        del there

"""Host memory that is registered in blocks, or that torch pins where nothing registers it: the same bits."""

import pytest
import torch
from torch import Tensor

import zero_core
from tests.device.zero_core.runs import differing
from tests.device.zero_offload import runs
from zero_offload import MemoryByteStore
from zero_offload.memory import host_registration as vendors


def trained(device: torch.device, placement: str, *, sleeps: bool = False) -> tuple[list[Tensor], str]:
    with runs.discrete(device):
        run, losses = runs.Run(device, placement, (64, 6, 8)), []
        for number in range(3):
            losses += run.step(number)
            if sleeps:
                zero_core.sleep(run.model, MemoryByteStore())
                zero_core.wake(run.model)
        seen = [loss.cpu() for loss in losses] + run.masters()
        told = str(run.store.stats()["huge_pages"])
        run.close()
    return seen, told


@pytest.mark.promise("device-no-register", "device-registration")
@pytest.mark.parametrize("how", ["torch pins it", "in blocks"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_memory_of_another_form_serves_as_well(
    device: torch.device, placement: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if the arena's pinned form is laid out otherwise, if memory is registered that the device cannot, if what
    slept wakes up with other bits, if a copy goes beyond its block, which the device refuses, or leaves out a part.
    """
    expected, _ = trained(device, placement)
    if how == "in blocks":
        monkeypatch.setattr(vendors, "BLOCK_BYTES", 12 << 12)
    else:
        monkeypatch.delattr(torch.get_device_module(device), "cudart", raising=False)
    found, told = trained(device, placement, sleeps=True)
    assert not differing(found, expected)
    assert device.type == "cpu" or how == "in blocks" or "torch pinned it" in told

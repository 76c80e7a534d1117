"""Host memory that is registered in blocks, or that torch pins where nothing registers it: the same bits."""

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from zero_offload import MemoryByteStore, TieredStore
from zero_offload.memory import host_registration as vendors


def trained(device: torch.device, placement: str, *, sleeps: bool = False) -> tuple[list[float], str]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to(device)
    store = TieredStore(placement, placement, placement, nvme=MemoryByteStore(), tile_numel=1 << 20)
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(8, 256, generator=generator).to(device)).square().mean()
        losses.append(float(kit.step(optimizer, loss)))
        if sleeps:
            zero_core.sleep(model, MemoryByteStore())
            zero_core.wake(model)
    told = str(store.stats()["huge_pages"])
    optimizer.close()
    return losses, told


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
    assert found == expected
    assert device.type == "cpu" or how == "in blocks" or "torch pinned it" in told

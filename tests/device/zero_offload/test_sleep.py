"""A model sleeps on a device: its memory there is free meanwhile, and what wakes up has the same bits.

Fails if memory is freed under a copy or a kernel, if a copy after wake() is not ordered behind what wake() wrote, or if
anything of the device is forgotten.
"""

import gc

import pytest
import torch
from torch import Tensor

import zero_core
from tests.device.zero_core.runs import differing
from tests.device.zero_offload import runs
from zero_core.util.freed_memory import HostMemory
from zero_offload import TieredStore

pytestmark = pytest.mark.promise("device-sleep-frees")

GPU = (512, 8, 64)
STORES = ["device store", "host", "nvme", "device", "thirds", "classic", "parameters in part"]


def trained(device: torch.device, store: str, *, sleeps: bool) -> list[Tensor]:
    seen: list[Tensor] = []
    with runs.discrete(device):
        run = runs.Run(device, runs.placed(device, store), runs.sized(device, GPU, (64, 4, 64)))
        to = None if isinstance(run.store, TieredStore) or device.type != "cpu" else HostMemory()

        def rest() -> None:
            if sleeps:
                zero_core.sleep(run.model, to)
                zero_core.wake(run.model)

        for number in range(2):
            for micro_batch in range(2):
                seen.append(run.backward(2 * number + micro_batch))
                rest()
            run.optimizer.step()
            run.optimizer.zero_grad()
            rest()
        seen = [loss.cpu() for loss in seen] + run.masters()
        run.close()
    return seen


@pytest.mark.promise("sleep")
@pytest.mark.parametrize("store", STORES)
def test_training_goes_on_with_the_same_bits(device, store):
    assert not differing(trained(device, store, sleeps=True), trained(device, store, sleeps=False))


@pytest.mark.parametrize("store", STORES)
def test_the_devices_memory_is_free_meanwhile(device, needs_device, store):
    needs_device("its allocator")
    module = torch.get_device_module(device)
    gc.collect()  # what earlier tests of this process have left is not this model's
    before = module.memory_allocated(device)
    run = runs.Run(device, runs.placed(device, store), runs.sized(device, GPU, (64, 4, 64)))
    run.step()
    run.backward()
    zero_core.sleep(run.model)
    held = module.memory_allocated(device) - before
    model = sum(buffer.nbytes for buffer in run.model.buffers()) + sum(batch.nbytes for batch in run.batches)
    assert held <= model + (1 << 16)
    zero_core.wake(run.model)
    run.optimizer.step()
    run.close()

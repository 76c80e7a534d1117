"""What one device holds: between steps what the store holds, inside one two units more; and no more as steps go by."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

import zero_core
from tests.device.zero_core import runs
from zero_core.unit_memory.write_checks import digest

SIZES = {  # width, blocks, rows: large units, and activations of next to nothing. By device, else the GPU's.
    "cpu": (32, 4, 8),
    "sim": (256, 6, 8),
    "gpu": (1024, 24, 8),  # 8.4 M elements a unit
}
CLOSE = 1.05


def allocated(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    gc.collect()  # an exception keeps the frames that it passed
    module = torch.get_device_module(device)
    module.synchronize(device)
    return module.memory_allocated(device)


def peak_of(device: torch.device, call: Any) -> int:
    """Bytes above what was there before, at the most."""
    if device.type == "cpu":
        call()
        return 0
    before, module = allocated(device), torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    call()
    return module.max_memory_allocated(device) - before


def sizes(device: torch.device) -> tuple[int, int, int]:
    return SIZES.get(device.type, SIZES["gpu"])


def warm_up(width: int, x: torch.Tensor) -> None:
    """What the libraries allocate once for a shape (workspaces) is not the model's."""
    block = runs.Wide(width, 1).to(x.device, x.dtype)
    for _ in range(2):
        runs.loss_of(block, x).backward()


def held_by_store(handle: zero_core.Handle, dtype: torch.dtype) -> int:
    """DeviceStore under AdamW: parameter, master, two moments, gradient; and for the step a unit's fp32 gradient."""
    numels = [unit.layout.shard_numel for unit in handle.units]
    if dtype == torch.float32:
        return sum(numels) * (4 + 8 + 4)
    return sum(numels) * (2 + 4 + 8 + 2) + max(numels) * 4


def forward_keeps(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that a forward of the dense model leaves for its backward."""
    before = allocated(x.device)
    loss = runs.loss_of(model, x)
    kept = allocated(x.device) - before
    del loss
    return kept


def one_block(width: int, x: torch.Tensor) -> int:
    """Bytes of one dense block's forward and backward: its gradients, and what kernels need beside them."""
    block = runs.Wide(width, 1).to(x.device, x.dtype)
    given = x.clone().requires_grad_(True)
    return peak_of(x.device, lambda: runs.loss_of(block, given).backward())


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stage_3_holds_what_the_store_holds_and_two_units(device, needs_device, dtype, swaps):
    width, blocks, rows = sizes(device)
    x = torch.randn(rows, width, device=device, dtype=dtype)
    warm_up(width, x)
    dense = runs.Wide(width, blocks).to(device, dtype)
    kept, alone = forward_keeps(dense, x), one_block(width, x)
    del dense
    before = allocated(device)
    model = runs.Wide(width, blocks).to(device)
    store = runs.swapping(device) if swaps else None
    optimizer = zero_core.shard(
        model, runs.fused(model.parameters()), param_dtype=dtype, store=store, prefetch_bytes=1
    )  # one unit ahead
    handle = zero_core.handle(model)

    def backward() -> None:
        runs.loss_of(model, x).backward()

    for _ in range(2):
        backward()
        optimizer.step()
        optimizer.zero_grad()
    held = allocated(device) - before
    plan = held_by_store(handle, dtype)
    unit_bytes = max(unit.nbytes for unit in handle.units)
    peak = peak_of(device, backward)
    optimizer.close()
    needs_device("bytes allocated")
    assert plan / CLOSE <= held <= plan * CLOSE, (held, plan)
    # Two units; what forward left for all blocks; one block's gradients with what its kernels need; and one parameter's
    # gradient that autograd has just made, before it is copied into the unit's.
    made = max(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    assert peak <= CLOSE * 2 * unit_bytes + kept + alone + made, (peak, unit_bytes, kept, alone)


@pytest.mark.parametrize("numel", [7, 5000, 1 << 20, (1 << 22) + 4096 + 5])
def test_a_digest_is_that_of_the_cpu_and_takes_little_memory(device, numel):
    """It is taken while a unit's parameters are there, and no plan has room for a second copy of them."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    there, found = values.to(device), list[torch.Tensor]()
    digest(there)
    peak = peak_of(device, lambda: found.append(digest(there)))
    assert found[0].cpu() == digest(values)
    assert peak <= values.nbytes // 32 + (1 << 16), peak

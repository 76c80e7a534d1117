"""The CUDA side of TieredStore: copies, stream order, registered memory. Skipped, visibly, without a GPU."""

from __future__ import annotations

import pytest
import torch

from zero_core.store import GroupStep, Segment, ShardSpec, StoreContext
from zero_offload import MemoryByteStore, TieredStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MI = 1 << 20


def run(device: str, placement: str) -> list[torch.Tensor]:
    """Three steps on a device; the gradients are exact in bf16, so that every device computes the same ones."""
    numels = (MI + 640, MI // 2)
    specs = [ShardSpec(f"u{i}", n, torch.bfloat16, (Segment(0, n, 0, f"u{i}.w"),)) for i, n in enumerate(numels)]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
    store = TieredStore(placement, placement, placement, nvme=MemoryByteStore(), tile_numel=MI)
    context = StoreContext(torch.device(device), reduce_dtype=torch.bfloat16)
    store.attach(specs, optimizer, lambda i: torch.linspace(-1, 1, numels[i]), context=context)
    groups = [GroupStep({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})]
    for number in range(1, 4):
        for i in (1, 0):
            parameters = store.parameters(i)
            assert parameters.device.type == device
            store.accept_gradient(i, torch.sign(parameters) * 0.5)
            store.release(i)
        scale = min(1.0, 10.0 / float(store.gradient_norm_squared()) ** 0.5)
        store.update(groups, scale, (0, 1), [[number], [number]])
    values = [store.read_state(i, name, 0, numels[i]).cpu() for i in (0, 1) for name in store.state_names()]
    for i in (0, 1):
        values.append(store.parameters(i).cpu().clone())
        store.release(i)
    store.close()
    return values


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_the_same_bits_as_on_the_cpu(placement: str) -> None:
    assert all(torch.equal(a, b) for a, b in zip(run("cuda", placement), run("cpu", "host"), strict=True))

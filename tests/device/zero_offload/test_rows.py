"""A batch that each unit computes a few rows at a time, on a device: the whole batch's gradients."""

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_offload import MemoryByteStore, TieredStore, TorchStep, offload_activations

pytestmark = pytest.mark.promise("device-rows")


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner, self.outer, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.drop(self.outer(torch.relu(self.inner(x)))) * scale


class Toy(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(dropout) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, torch.ones(16, device=x.device))
        return x


def gradients(device: torch.device, policy: str, rows: int | None, dropout: float) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Toy(dropout)
    store = TieredStore("host", "host", "host", nvme=MemoryByteStore(), step=TorchStep(), tile_numel=1 << 20)
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store, device=device)
    with offload_activations(model, store, policy, rows=rows, row_modules=["layers.*"]):
        torch.manual_seed(1)
        model(torch.randn(6, 5, 16).to(device)).square().mean().backward()
        found = {name: zero_core.full_gradient(p).cpu() for name, p in model.named_parameters()}
    optimizer.close()
    return found


@pytest.mark.parametrize("policy", ["recompute", "host", "nvme"])
def test_parts_have_the_whole_batchs_gradients(device: torch.device, policy: str) -> None:
    """Six rows in parts of four and two."""
    whole, parts = (gradients(device, policy, rows, dropout=0.0) for rows in (None, 4))
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, rtol=1e-5, atol=1e-7)


def test_dropout_is_the_same_under_every_policy(device: torch.device) -> None:
    first, second = (gradients(device, policy, 2, dropout=0.5) for policy in ("recompute", "nvme"))
    assert all(torch.equal(first[name], values) for name, values in second.items())

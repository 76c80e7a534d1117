"""The change test: an optimizer of one's own is one file, examples/own_step.py.

Fails if anything between a training loop and a tile knows the optimizers by name.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_core
from examples.own_step import Signum, SignumStep
from tests import kit
from zero_offload import MemoryByteStore, TieredStore
from zero_offload.protocols import UpdateStep
from zero_offload.testing import UpdateStepSuite


class TestSignum(UpdateStepSuite):
    def make_step(self) -> UpdateStep:
        return SignumStep()

    def optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return Signum(parameters, lr=1e-2)


@pytest.mark.promise("own-update-step")
@pytest.mark.parametrize("tier", ["host", "nvme"])
def test_a_model_trains_to_the_bits_of_the_plain_optimizer(tier: Any) -> None:
    def train(sharded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
        optimizer: Any = Signum(model.parameters(), lr=1e-2)
        if sharded:
            store = TieredStore(tier, tier, tier, MemoryByteStore(), SignumStep(), tile_numel=1 << 20)
            optimizer = zero_core.shard(model, optimizer, store=store)
        for _ in range(5):
            kit.step(optimizer, model(torch.randn(16, 8)).square().mean())
        with zero_core.gathered(model) if sharded else nullcontext():
            return [parameter.detach().clone() for parameter in model.parameters()]

    for ours, plain in zip(train(True), train(False), strict=True):
        assert torch.equal(ours, plain)

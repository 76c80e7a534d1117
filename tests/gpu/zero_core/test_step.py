"""The same training on a GPU: one rank, every stage, beside the dense twin on the same device."""

from __future__ import annotations

import pytest
import torch

import zero_core
from tests.integration.zero_core import toys
from zero_core.reference import Reference


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_equals_the_twin(device, stage, dtype):
    torch.manual_seed(0)
    model, dense = toys.Stack().to(device), toys.Stack().to(device)
    dense.load_state_dict(model.state_dict())
    reference = Reference(dense, toys.adamw, param_dtype=dtype, max_grad_norm=0.5)
    optimizer = zero_core.shard(
        model,
        toys.adamw(model.parameters()),
        stage=stage,
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        max_grad_norm=0.5,
    )

    def loss(model, x):
        return model(x.to(device, dtype)).float().square().mean()

    for step in range(5):
        loss(model, toys.data(step, 0)).backward()
        optimizer.step()
        reference.step([toys.data(step, 0)], loss)
        assert optimizer.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
    with zero_core.gathered(model, master=True):
        for ours, theirs in zip(model.parameters(), reference.masters, strict=True):
            torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)

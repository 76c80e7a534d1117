"""Tiled linears inside the blocks of a sharded model: small units, the same numbers."""

import pytest
import torch

import zero_core
from tests import models
from tests.integration.zero_core import checkpoint_runs as runs


def train_tiled(threshold: int) -> tuple[int, list[float]]:
    """Three steps of a Llama, its large linears tiled or not; the largest unit and the losses."""
    torch.manual_seed(0)
    model = models.build("llama")
    if threshold:
        assert len(zero_core.tile_linear(model, threshold)) > 6
    optimizer = zero_core.shard(model, runs.adamw(model.parameters()), stage=3, max_grad_norm=runs.CLIP)
    losses = runs.train(model, optimizer, 0, 3)
    largest = max(sum(p.numel() for p in unit.parameters) for unit in zero_core.units(model))
    optimizer.close()
    return largest, losses


@pytest.mark.promise("tiles-are-units")
@pytest.mark.parametrize("size", [1, 2])
def test_tiles_are_units_and_change_no_number(ranks, size: int) -> None:
    whole = ranks(size).run(train_tiled, 0)[0]
    tiled = ranks(size).run(train_tiled, 600)[0]
    assert tiled[1] == pytest.approx(whole[1], rel=1e-6)
    assert tiled[0] < whole[0] / 2

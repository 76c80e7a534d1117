"""Integer parameters are in shards like all others, deferred or not, and are rank 0's on every rank.

Fails if one stays on meta, where the forward raises torch's own error, differs between ranks, or is kept whole.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.codes = nn.Parameter(torch.randint(1, 9, (8, 8), dtype=torch.int16).t(), requires_grad=False)
        self.flag = nn.Parameter(torch.tensor(True), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ self.codes.float() * self.flag


def trained(deferred: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rank, _ = toys.world()
    torch.manual_seed(0 if deferred else rank)
    if deferred:
        with zero_core.deferred_init():
            model = Table()
    else:
        model = Table()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    sharded = zero_core.shard(model, optimizer)
    held = sum(unit.flat.untyped_storage().nbytes() for unit in zero_core.units(model))
    assert held == 0 and not model.codes.is_meta
    output = model(torch.ones(2, 8))
    kit.step(sharded, output.sum())
    codes = model.codes.detach().clone()
    sharded.close()
    return codes, output.detach()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_integers_are_sharded_and_are_the_same_on_every_rank(ranks, size: int, deferred: bool) -> None:
    results = ranks(size).run(trained, deferred)
    for codes, output in results:
        assert torch.equal(codes, results[0][0]) and torch.equal(output, results[0][1]) and output.isfinite().all()
    assert results[0][0].unique().numel() > 4

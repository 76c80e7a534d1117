"""torch's own clipping over a TieredStore: the same bits in host memory and on NVMe, near plain torch's.

Units have several tiles, so that one parameter lies on several tiers. Fails if a coefficient misses a tile, is applied
twice, or reaches updates that overlap with the next forward too late.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.chunks import small_chunks
from tests.integration.zero_offload.test_full_values import MIXED, sgd, store_of
from tests.integration.zero_offload.training import Model, loss_of

UTILS = nn.utils


def clip(model: nn.Module, step: int) -> Tensor:
    """Of all parameters; of some; of all to another norm; by value."""
    if step % 4 == 3:
        UTILS.clip_grad_value_(model.parameters(), 0.01)
        return torch.zeros(())
    given = list(model.parameters())[: 3 if step % 4 == 1 else None]
    return UTILS.clip_grad_norm_(given, 0.3, norm_type=torch.inf if step % 4 == 2 else 2.0)


def train(placement: Any, overlap: bool) -> list[Tensor]:
    dense, model = kit.twins(lambda: Model(64, 2))
    theirs = sgd(dense.parameters())
    with small_chunks():
        ours = zero_core.shard(model, sgd(model.parameters()), store=store_of(placement, overlap=overlap))
        for step in range(5):
            for each in (model, dense):
                loss_of(each, step, 0).backward()
            torch.testing.assert_close(clip(model, step), clip(dense, step), rtol=1e-5, atol=1e-6)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        found = [p.detach().clone() for p in model.parameters()]
        ours.close()
    torch.testing.assert_close(found, list(dense.parameters()), rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.promise("stock-clipping-reads-none")
@pytest.mark.parametrize("placement", ["nvme", MIXED], ids=["nvme", "mixed"])
def test_clipping_gives_the_same_bits_on_every_tier_and_those_of_plain_torch_nearly(placement):
    host = train("host", overlap=True)
    for overlap in (True, False):
        for a, b in zip(train(placement, overlap), host, strict=True):
            assert torch.equal(a, b)

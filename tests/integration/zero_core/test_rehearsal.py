"""What a run's pool comes to is what was rehearsed. Fails if a buffer is taken or given back elsewhere than there."""

from contextlib import nullcontext

import pytest
import torch

import zero_core
from tests import kit
from tests.covers import pairwise
from tests.integration.zero_core import toys
from zero_core.estimate.pool_simulation import Rehearsal, UnitSize
from zero_core.unit_memory.unit_memory import CAN_SWAP


def held(stage, accumulate, no_sync, dtype, ahead, stays):
    """(bytes of the run's pool, bytes rehearsed) after two steps."""
    model, options = toys.Uneven(), {"prefetch_bytes": ahead, "resident_bytes": stays}
    optimizer = zero_core.shard(model, kit.sgd(kit.trained(model)), stage=stage, param_dtype=dtype, **options)
    for _ in range(2):
        for micro in range(accumulate):
            with zero_core.no_sync(model) if no_sync and micro + 1 < accumulate else nullcontext():
                model(torch.ones(3, 64, dtype=dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle = zero_core.handle(model)
    size, sharded = handle.ranks.size, handle.ranks.shard.size
    arriving = 1 if size > 1 and (no_sync or stage == 1) else accumulate
    units = [UnitSize(u.layout.numel, u.dtype.itemsize, u.trainable, u.name == "root") for u in zero_core.units(model)]
    rehearsed = Rehearsal(
        units, stage, shard_count=sharded, replicas=size // sharded, reduce_itemsize=dtype.itemsize,
        accumulate=accumulate, no_sync=no_sync, lends=0 if arriving > 1 and dtype != torch.float32 else 1,
        **options,
    ).pooled_bytes()  # fmt: skip
    found = handle.engine.pool.peak_nbytes
    optimizer.close()
    return found, rehearsed


FACTORS = {
    "stage": (0, 1, 2, 3),
    "accumulate": (1, 2, 4),
    "no_sync": (False, True),
    "dtype": (torch.float32, torch.bfloat16),
    "ahead": (0, 30_000, 150_000, 1 << 30),
    "stays": (0, 30_000, 1 << 30),
}


@pytest.mark.promise("rehearsed-pool")
@kit.on_ranks(1, 2)
def test_the_pool_of_a_run_is_the_one_rehearsed(size):
    """Without swapping, units that are gathered have memory of their own, which the rehearsal counts."""
    found = {tuple(case.values()): held(**case) for case in pairwise(FACTORS)}
    assert len(found) >= 12 and (size == 1 or not CAN_SWAP or all(pair[0] for pair in found.values()))
    own = size > 1 and not CAN_SWAP
    assert not {case: pair for case, pair in found.items() if pair[0] != pair[1] and not (own and pair[0] < pair[1])}

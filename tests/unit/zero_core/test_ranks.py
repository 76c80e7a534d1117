"""Collectives between real ranks: what each rank is left with, and what it says it sent."""

from __future__ import annotations

import pytest
import torch

from zero_core.comm.ranks import Ranks
from zero_core.pool import Pool


def reduce_bf16() -> tuple[bool, bool, int]:
    """(part is the fp32 mean rounded once, memory was given back, elements sent)."""
    device = torch.device("cpu")
    pool = Pool(device)
    ranks = Ranks.build(None, pool, sharded=True, device=device)
    size, numel = ranks.shard.size, 1000
    wholes = [torch.randn(size * numel, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(size)]
    part = torch.empty(numel, dtype=torch.bfloat16)
    for _ in range(2):
        work = ranks.reduce_scatter(part, wholes[ranks.rank], "unit", 0)
        ranks.wait(work, "reduce_scatter", "unit")
    total = torch.zeros(numel)
    for whole in wholes:
        total += whole.view(size, numel)[ranks.rank]
    exact = torch.equal(part, (total / size).bfloat16())
    return exact, pool.nbytes == wholes[0].nbytes, ranks.sent_numel["reduce_scatter"]


@pytest.mark.parametrize("size", [2, 4])
def test_a_reduce_scatter_on_gloo_adds_in_fp32_and_rounds_once(ranks, size):
    for exact, given_back, sent in ranks(size).run(reduce_bf16):
        assert exact and given_back
        assert sent == 2 * 1000 * (size - 1)


def broadcast_strided() -> list[float]:
    device = torch.device("cpu")
    ranks = Ranks.build(None, Pool(device), sharded=True, device=device)
    strided = torch.arange(6.0).view(2, 3).t() + 10 * ranks.rank
    ranks.broadcast(strided, "buffers", source=1)
    ranks.broadcast(torch.empty(0), "buffers")
    return strided.flatten().tolist()


def test_a_broadcast_fills_a_tensor_of_any_strides(ranks):
    assert ranks(2).run(broadcast_strided) == [[10.0, 13.0, 11.0, 14.0, 12.0, 15.0]] * 2

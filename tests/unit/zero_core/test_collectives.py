"""Collectives between real ranks: what each rank is left with, and what it says it sent."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zero_core.comm.collectives import Ranks
from zero_core.comm.peers import Averaging, Axis, Gathering, add_up, broadcast
from zero_core.pool import Pool


def reduce_bf16() -> tuple[bool, bool, int]:
    """(part is the fp32 mean rounded once, memory was given back, elements sent)."""
    device = torch.device("cpu")
    ranks, pool = Ranks.build(None, sharded=True, device=device), Pool(device)
    size, numel = ranks.shard.size, 1000
    wholes = [torch.randn(size * numel, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(size)]
    part = torch.empty(numel, dtype=torch.bfloat16)
    for _ in range(2):
        work = ranks.reduce_scatter(part, wholes[ranks.rank], "unit", 0, pool)
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


def message(numel: int) -> bool:
    """Every collective made of messages against what torch's own leaves, for one size."""
    size, rank = dist.get_world_size(), dist.get_rank()
    axis, pool = Axis(dist.group.WORLD, rank, size), Pool(torch.device("cpu"))
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    rows = torch.empty(size, numel)
    Gathering(rows.unbind(), values[rank], axis, 1).wait()
    averaged, summed = values[rank].clone(), values[rank].double()
    Averaging(averaged, axis, 2, pool).wait()
    add_up(summed, axis, 3)
    told = [values[rank].clone() for _ in range(size)]
    for source, each in enumerate(told):
        broadcast(each, source, axis, 4)
    strided = torch.arange(6.0).view(2, 3).t() + rank
    broadcast(strided, 0, axis, 5)
    wanted = torch.stack(values)
    torch.testing.assert_close(averaged, wanted.mean(0))
    torch.testing.assert_close(summed, wanted.double().sum(0))
    assert not pool.lent
    return torch.equal(rows, wanted) and torch.equal(torch.stack(told), wanted) and strided[0, 1] == 3.0


@pytest.mark.parametrize("size", [2, 4])
def test_messages_leave_what_collectives_leave(ranks, size):
    """Sizes that the ranks do not divide among them, and fewer elements than there are ranks."""
    for numel in (1, 3, 10):
        assert all(ranks(size).run(message, numel))

"""Collectives made of messages between peers, against what torch's own leave."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from zero_core.comm import Axis, MessageCollectives
from zero_core.pool import Pool


def message(numel: int) -> bool:
    """Every collective made of messages, for one size."""
    size, rank, pool = dist.get_world_size(), dist.get_rank(), Pool(torch.device("cpu"))
    messages = MessageCollectives(Axis(dist.group.WORLD, rank, size), pool)
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    rows = torch.empty(size * numel)
    messages.all_gather(rows, values[rank], 1, exact=True).wait()
    averaged, summed = values[rank].clone(), values[rank].double()
    messages.all_reduce(averaged, 2).wait()
    messages.sum(summed, 3)
    told = [values[rank].clone() for _ in range(size)]
    for source, each in enumerate(told):
        messages.broadcast(each, source, 4)
    wanted = torch.stack(values)
    torch.testing.assert_close(averaged, wanted.mean(0))
    torch.testing.assert_close(summed, wanted.double().sum(0))
    assert not pool.lent
    return torch.equal(rows.view(size, numel), wanted) and torch.equal(torch.stack(told), wanted)


@pytest.mark.parametrize("size", [2, 4])
def test_messages_leave_what_collectives_leave(ranks, size):
    """Sizes that the ranks do not divide among them, and fewer elements than there are ranks."""
    for numel in (1, 3, 10):
        assert all(ranks(size).run(message, numel))

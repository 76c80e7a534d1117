"""Collectives made of messages between peers, against what torch's own leave."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from tests import kit
from zero_core.comm import Axis, MessageCollectives
from zero_core.comm.peers import broken_off
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


@kit.on_ranks(2)
def test_a_thread_that_waits_in_a_group_that_was_destroyed_is_freed():
    """As at the exit of a program that destroys its groups, while a checkpoint is written in the background."""
    group, failed = dist.new_group(backend="gloo"), threading.Event()
    other, begun = 1 - dist.get_rank(), threading.Event()

    def waits():
        try:
            work = group.recv([torch.empty(1)], other, 7)
            begun.set()
            work.wait()
        except RuntimeError:
            failed.set()

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    assert begun.wait(30)
    dist.barrier()  # both wait
    dist.destroy_process_group(group)
    broken_off(group)
    thread.join(30)
    assert failed.is_set()

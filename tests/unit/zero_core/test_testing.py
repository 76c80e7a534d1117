"""The pool of ranks: results by rank, an error ends it, the next use makes a new one."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zero_core.testing import RankError


def total(value: float) -> tuple[int, float]:
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return dist.get_rank(), float(tensor)


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def seed_left() -> tuple[int, float]:
    """The seed that this call began with, and a number. Leaves another seed on each rank."""
    began = torch.initial_seed(), float(torch.rand(()))
    torch.manual_seed(dist.get_rank())
    return began


def test_every_call_begins_with_the_same_seed(ranks):
    """Fails if ranks differ because of a test that ran before."""
    found = [*ranks(2).run(seed_left), *ranks(2).run(seed_left)]
    assert {seed for seed, _ in found} == {0} and len(set(found)) == 1


def test_a_dead_rank_is_noticed(ranks):
    with pytest.raises(RankError, match=r"rank (1 of 2 died, exit code 3|0 of 2 raised)"):
        ranks(2).run(die_on_one)
    assert ranks(2).run(total, 0.0) == [(0, 1.0), (1, 1.0)]


def raise_late_on_rank_1() -> None:
    time.sleep(0.3 * dist.get_rank())
    raise ValueError(f"of rank {dist.get_rank()}")


def test_the_first_error_comes_with_those_of_other_ranks(ranks):
    """Which may be its cause. Fails if only the rank that reports first is named."""
    with pytest.raises(RankError, match="rank 0 of 2 raised:(.|\n)*of rank 0\n*\nrank 1 raised: ValueError: of rank 1"):
        ranks(2).run(raise_late_on_rank_1)
    assert ranks(2).run(total, 0.0) == [(0, 1.0), (1, 1.0)]


def break_the_group() -> None:
    """A receive that nobody answers: its time-out closes the connections."""
    with pytest.raises(RuntimeError):
        dist.group.WORLD._get_backend(torch.device("cpu")).recv([torch.empty(1)], 1 - dist.get_rank(), 7).wait(
            timedelta(milliseconds=1)
        )


def test_a_call_that_breaks_the_group_is_named_by_the_next(ranks):
    """Which fails without a cause of its own. Fails if the error leaves the reader with the later call."""
    ranks(2).run(break_the_group)
    with pytest.raises(RankError, match="left the process group broken: break_the_group"):
        ranks(2).run(total, 0.0)
    assert ranks(2).run(total, 0.0) == [(0, 1.0), (1, 1.0)]

"""Collectives between real ranks: what each rank is left with."""

from typing import Any

import pytest
import torch

from tests import kit
from zero_core.comm.collectives import Axis
from zero_core.comm.ranks import ALONE, Ranks
from zero_core.pool import Pool


def made(pool: Pool | None = None) -> Ranks:
    pool = pool or Pool(torch.device("cpu"))
    return Ranks.build(None, pool, sharded=True, collectives=None, secondary=False)


@kit.on_ranks(2, 4)
def test_a_reduce_scatter_on_gloo_adds_in_fp32_and_rounds_once(size) -> None:
    pool = Pool(torch.device("cpu"))
    ranks = made(pool)
    numel = 1000
    wholes = [torch.randn(size * numel, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(size)]
    part = torch.empty(numel, dtype=torch.bfloat16)
    for _ in range(2):
        work = ranks.reduce_scatter(part, wholes[ranks.rank], "unit")
        ranks.wait(work, "reduce_scatter", "unit")
    total = torch.zeros(numel)
    for whole in wholes:
        total += whole.view(size, numel)[ranks.rank]
    assert torch.equal(part, (total / size).bfloat16())
    assert pool.nbytes == wholes[0].nbytes, "the memory was given back"


@pytest.mark.promise("broadcast-strides")
@kit.on_ranks(2)
def test_a_broadcast_fills_a_tensor_of_any_strides() -> None:
    ranks = made()
    strided = torch.arange(6.0).view(2, 3).t() + 10 * ranks.rank
    ranks.broadcast(strided, "buffers", source=1)
    ranks.broadcast(torch.empty(0), "buffers")
    assert strided.flatten().tolist() == [10.0, 13.0, 11.0, 14.0, 12.0, 15.0]


def test_the_digest_tells_which_collective_it_was_and_of_which_unit() -> None:
    """Fails if two of them are alike: `all_gather` and `all_reduce` have names of one length."""
    digests = set()
    for collective in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
        for unit in ("blocks.0", "blocks.1"):
            ranks = made()
            with ranks._naming(collective, unit):
                digests.add(ranks.digest)
    assert len(digests) == 8


def test_a_gather_inside_the_machine_asks_for_all_bits() -> None:
    """Values that were rounded in the gather from all machines are not rounded again."""
    asked = []

    class Inexact:
        def __init__(self, *given: Any) -> None: ...

        def all_gather(self, *given: Any, exact: bool) -> None:
            asked.append(exact)

    inside: Any = Axis(object(), 0, 2)
    ranks = Ranks(ALONE, ALONE, Pool(torch.device("cpu")), Inexact, inside)  # type: ignore[arg-type]
    ranks.all_gather_inside(torch.empty(4), torch.empty(2), "unit")
    assert asked == [True]

"""Collectives in the order of streams, on two ranks: results as gloo's on the CPU, ordered and waited for as NCCL's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from .two_ranks import TwoRanks

zero_sim = pytest.importorskip("zero_sim", exc_type=ImportError)


@pytest.fixture(scope="module")
def two() -> Iterator[TwoRanks]:
    ranks = TwoRanks()
    yield ranks
    ranks.close()


def collectives(rank: int, place: str, asynchronous: bool) -> dict[str, Any]:
    """Collectives of flat tensors: lists of numbers by name."""
    device = f"sim:{rank}" if place == "sim" else "cpu"

    def ramp(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.arange(n, device=device) + 10 * rank + 1).to(dtype)

    made: dict[str, Any] = {}

    def done(work: Any, name: str, *results: torch.Tensor) -> None:
        if work is not None:
            work.wait()
        made[name] = [r.tolist() for r in results]

    flags = {"async_op": asynchronous}
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            if op == dist.ReduceOp.AVG and dtype == torch.int64:
                continue
            x = ramp(6, dtype)
            done(dist.all_reduce(x, op, **flags), f"all_reduce {op} {dtype}", x)
            if op != dist.ReduceOp.AVG or place == "sim":
                into = torch.empty(3, dtype=dtype, device=device)
                done(
                    dist.reduce_scatter_tensor(into, ramp(6, dtype), op, **flags), f"reduce_scatter {op} {dtype}", into
                )
    for dtype in (torch.float32, torch.uint8, *((torch.bool, torch.int16) if place == "sim" else ())):  # more than gloo
        whole = torch.zeros(6, dtype=dtype, device=device)
        done(dist.all_gather_into_tensor(whole, ramp(3, dtype), **flags), f"all_gather {dtype}", whole)
    whole = torch.zeros(6, device=device)
    mine = whole[3 * rank : 3 * rank + 3]
    mine.fill_(rank + 1)
    done(dist.all_gather_into_tensor(whole, mine, **flags), "all_gather in place", whole)
    x = ramp(4)
    done(dist.broadcast(x, 1, **flags), "broadcast", x)
    into = torch.zeros(4, device=device)
    done(dist.all_to_all_single(into, ramp(4), **flags), "all_to_all", into)
    into = torch.zeros(3 - rank if rank else 4, device=device)  # rank 0 gets 1 + 3, rank 1 gets 1 + 1
    sizes = ([1, 3], [1, 1]) if rank == 0 else ([1, 1], [3, 1])
    done(dist.all_to_all_single(into, ramp(sum(sizes[1])), *sizes, **flags), "all_to_all unequal", into)
    return made


def both(rank: int, asynchronous: bool) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    zero_sim.configure(jitter_us=300)
    found = collectives(rank, "sim", asynchronous)
    zero_sim.races.synchronize()
    return collectives(rank, "cpu", False), found, [str(race) for race in zero_sim.take_races()]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in the caller's stream", "async_op"])
def test_results_are_gloos_and_without_a_race(two: TwoRanks, asynchronous: bool):
    """Fails if a collective reads or writes other bytes than it says, before or after its turn."""
    for expected, found, races in two.run(both, asynchronous):
        assert {name: found[name] for name in expected} == expected
        assert not races


def dropped(rank: int) -> list[str]:
    for _ in range(20):
        x = torch.ones(4096, device=torch.device("sim", rank))
        dist.all_reduce(x, async_op=True)  # nobody keeps the work, nor the tensor
        del x
        torch.zeros(4096, device=torch.device("sim", rank)).add_(1)
    zero_sim.races.synchronize()
    return [str(race) for race in zero_sim.take_races()]


def test_a_collective_that_nobody_waits_for_keeps_its_memory(two: TwoRanks):
    assert two.run(dropped) == [[], []]


def mixed(rank: int) -> list[float]:
    """Collectives of one group on several streams happen in the order of their calls, on each rank."""
    device = torch.device("sim", rank)
    tensors = [torch.full((64,), float(n), device=device) for n in range(12)]
    torch.sim.synchronize()
    zero_sim.configure(jitter_us=3000, seed=rank)
    streams = [torch.sim.Stream() for _ in range(3)]
    for n, x in enumerate(tensors):
        with torch.sim.stream(streams[n % 3]):
            dist.all_reduce(x)
    zero_sim.races.synchronize()
    zero_sim.configure(jitter_us=0)
    return [x[0].item() for x in tensors]


def test_one_order_for_all_streams(two: TwoRanks):
    assert two.run(mixed) == [[2.0 * n for n in range(12)]] * 2

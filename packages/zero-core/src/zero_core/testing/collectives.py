"""Tests every rule of the `Collectives` protocol, as a suite to subclass (`CollectivesSuite`). Imports no pytest.

Every rank compares the values that it receives with those that it computes itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Axis, Collectives, CollectivesFactory, RowCollectives
from ..pool import Pool
from ..precision import as_bytes

_SIZES = (1, 7, 1000)  # elements of a shard


class CollectivesSuite:
    """Subclass it in a test module as `class TestX(CollectivesSuite)`; set `collectives` and define `pool`.

    collectives: a factory at the top level of a module, from which the ranks import it.
    gather_tolerance: largest error of a gather that need not be exact, relative to the largest magnitude of the shard.
    reduce_tolerance: likewise for a mean, besides one rounding to the dtype for each rank. ranks: numbers of ranks with
    which everything runs.
    rows: whether the collectives are `RowCollectives` too, for optimizers that need whole parameters.
    """

    collectives: CollectivesFactory
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
    ranks: Sequence[int] = (1, 2, 3)
    device_type = "cpu"
    gather_tolerance = 0.0
    reduce_tolerance = 1e-6
    rows = True

    def pool(self, size: int) -> Any:
        """A `zero_core.testing.RankPool` of `size` ranks. Keep it between the tests: to start one takes seconds."""
        raise NotImplementedError

    # -- tests -------------------------------------------------------------------------------------------------------

    def test_a_gather_brings_every_shard_to_every_rank(self) -> None:
        self._check("gather")

    def test_an_exact_gather_brings_every_bit(self) -> None:
        self._check("gather_exactly")

    def test_a_reduce_scatter_leaves_the_mean_of_each_ranks_row(self) -> None:
        self._check("reduce")

    def test_shards_of_different_sizes_are_gathered_and_reduced(self) -> None:
        if self.rows:
            self._check("rows")

    def test_an_all_reduce_leaves_the_mean_on_every_rank(self) -> None:
        self._check("average")

    def test_a_sum_is_in_double_precision(self) -> None:
        self._check("add_up")

    def test_a_broadcast_brings_every_bit_of_its_source(self) -> None:
        self._check("tell")

    def test_several_are_under_way_at_a_time(self) -> None:
        self._check("overlap")

    def test_ranks_of_a_smaller_group_are_numbered_in_the_group(self) -> None:
        for check in ("tell", "gather"):
            self._check(check, members=2)

    def _check(self, check: str, members: int = 0) -> None:
        """Runs the method `check` of `_Rank` on all ranks of each pool, or on the last `members` of more."""
        told = tuple(self.dtypes), self.gather_tolerance, self.reduce_tolerance
        for size in self.ranks:
            if size > members:
                self.pool(size).run(_on_rank, type(self).collectives, self.device_type, members or size, check, told)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(as_bytes(a.cpu()), as_bytes(b.cpu()))


class _Filled(Pool):
    """Lends memory that is not zero."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        return super().take(numel, dtype).fill_(77)


def _on_rank(factory: CollectivesFactory, device_type: str, members: int, check: str, told: Any) -> None:
    """Runs on every rank of a pool: the method `check` of a `_Rank` of the last `members`."""
    world = dist.get_world_size()
    first = world - members
    group = dist.new_group(list(range(first, world))) if first else dist.group.WORLD
    rank = dist.get_rank() - first
    if rank < 0:
        return
    device = torch.device(device_type, dist.get_rank()) if device_type != "cpu" else torch.device("cpu")
    pool = _Filled(device)
    collectives = factory(Axis(group, rank, members), pool)
    assert isinstance(collectives, Collectives)
    getattr(_Rank(collectives, rank, members, device, *told), check)()
    assert pool.lent == 0, f"{pool.lent} buffers of the pool were not given back"


@dataclass
class _Rank:
    """The calls of one rank of a group, and the values that it has to receive."""

    collectives: Collectives
    rank: int
    size: int
    device: torch.device
    dtypes: Sequence[torch.dtype]
    gather_tolerance: float
    reduce_tolerance: float

    # -- checks ------------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        for numel, dtype in self._cases():
            for in_place in (False, True):
                whole, part = self._zeros(self.size * numel, dtype), self._values(self.rank, numel, dtype)
                if in_place:
                    part = whole[self.rank * numel : (self.rank + 1) * numel].copy_(part)
                self.collectives.all_gather(whole, part, 5, exact=False).wait()
                assert in_place or _same_bits(part, self._values(self.rank, numel, dtype)), "the shard was written"
                self._compare_gathered(whole, numel, dtype)

    def gather_exactly(self) -> None:
        for numel in _SIZES:
            whole = self._zeros(self.size * numel, torch.float32)
            self.collectives.all_gather(whole, self._noise(self.rank, numel), 5, exact=True).wait()
            assert _same_bits(whole, torch.cat([self._noise(rank, numel) for rank in range(self.size)]))

    def reduce(self) -> None:
        for numel, dtype in self._cases():
            every = [self._values(rank, self.size * numel, dtype) for rank in range(self.size)]
            part, whole = self._zeros(numel, dtype), every[self.rank].clone()
            self.collectives.reduce_scatter(part, whole, 5).wait()
            assert _same_bits(whole, every[self.rank]), "the input was written"
            self._compare_mean(part, [each.view(self.size, numel)[self.rank] for each in every])

    def rows(self) -> None:
        collectives, sizes = self.collectives, [(1000, 1, 7, 40)[rank % 4] for rank in range(self.size)]
        assert isinstance(collectives, RowCollectives), "set rows = False for collectives of equal shards alone"
        for dtype in self.dtypes:
            mine = self._values(self.rank, sizes[self.rank], dtype)
            for in_place in (False, True):
                whole, part = self._zeros(sum(sizes), dtype), mine.clone()
                rows = whole.split(sizes)
                if in_place:
                    part = rows[self.rank].copy_(part)
                collectives.all_gather_rows(rows, part, 5).wait()
                assert _same_bits(part, mine), "the shard was written"
                expected = torch.cat([self._values(rank, n, dtype) for rank, n in enumerate(sizes)])
                assert _same_bits(whole, expected), "a gather of rows brings every bit"
            every = [self._values(rank, sum(sizes), dtype) for rank in range(self.size)]
            part, whole = self._zeros(sizes[self.rank], dtype), every[self.rank].clone()
            collectives.reduce_scatter_rows(part, whole.split(sizes), 5).wait()
            assert _same_bits(whole, every[self.rank]), "the input was written"
            self._compare_mean(part, [each.split(sizes)[self.rank] for each in every])

    def average(self) -> None:
        for numel, dtype in self._cases():
            values = self._values(self.rank, numel, dtype)
            self.collectives.all_reduce(values, 5).wait()
            self._compare_mean(values, [self._values(rank, numel, dtype) for rank in range(self.size)])
            self._compare_ranks(values)

    def add_up(self) -> None:
        values = self._values(self.rank, 5, torch.float64)
        self.collectives.sum(values, 5)
        expected = torch.stack([self._values(rank, 5, torch.float64) for rank in range(self.size)]).sum(0)
        torch.testing.assert_close(values.cpu(), expected.cpu(), rtol=0, atol=1e-14 * self.size)
        self._compare_ranks(values)

    def tell(self) -> None:
        for source in range(self.size):
            for dtype in (torch.uint8, torch.int64, torch.float64, *self.dtypes):
                values = self._values(self.rank, 6, dtype).view(2, 3)
                self.collectives.broadcast(values, source, 5)
                assert _same_bits(values, self._values(source, 6, dtype)), (source, dtype)

    def overlap(self) -> None:
        """Two gathers and a reduction begin, a sum comes between, and the last one begun is waited for first."""
        dtype = self.dtypes[0]
        part, whole = self._values(self.rank, 1000, dtype), self._values(self.rank, self.size * 7, dtype)
        first, second = (self._zeros(self.size * 1000, dtype) for _ in range(2))
        reduced = self._zeros(7, dtype)
        works = [
            self.collectives.all_gather(first, part, 1, exact=False),
            self.collectives.all_gather(second, part, 2, exact=False),
            self.collectives.reduce_scatter(reduced, whole, 3),
        ]
        self.collectives.sum(self._zeros(2, torch.float64), 4)
        for work in reversed(works):
            work.wait()
        self._compare_gathered(first, 1000, dtype)
        self._compare_gathered(second, 1000, dtype)
        every = [self._values(rank, self.size * 7, dtype) for rank in range(self.size)]
        self._compare_mean(reduced, [each.view(self.size, 7)[self.rank] for each in every])

    # -- shared by the checks ----------------------------------------------------------------------------------------

    def _cases(self) -> list[tuple[int, torch.dtype]]:
        return [(numel, dtype) for numel in _SIZES for dtype in self.dtypes]

    def _zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def _values(self, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(rank)
        return (10 * torch.randn(numel, generator=generator, dtype=torch.float64)).to(dtype).to(self.device)

    def _noise(self, rank: int, numel: int) -> Tensor:
        """Returns (numel,) float32 of any bits: also of infinities, subnormal numbers, and NaNs."""
        generator = torch.Generator().manual_seed(rank)
        bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64).to(torch.int32)
        return bits.view(torch.float32).to(self.device)

    def _compare_gathered(self, whole: Tensor, numel: int, dtype: torch.dtype) -> None:
        for rank, found in enumerate(whole.view(self.size, numel)):
            part = self._values(rank, numel, dtype)
            assert _same_bits(found, self.collectives.arrives_as(part)), "other values than arrives_as() says"
            error = float((found.cpu().double() - part.cpu().double()).abs().max())
            assert error <= self.gather_tolerance * float(part.abs().max()), (rank, numel, dtype, error)

    def _compare_mean(self, found: Tensor, values: Sequence[Tensor]) -> None:
        stacked = torch.stack(list(values)).cpu().double()
        allowed = (self.size * torch.finfo(found.dtype).eps + self.reduce_tolerance) * float(stacked.abs().max())
        error = float((found.cpu().double() - stacked.mean(0)).abs().max())
        assert error <= allowed, (self.size, found.numel(), found.dtype, error, allowed)

    def _compare_ranks(self, found: Tensor) -> None:
        first = found.clone()
        self.collectives.broadcast(first, 0, 6)
        assert _same_bits(first, found), "ranks have different bits"

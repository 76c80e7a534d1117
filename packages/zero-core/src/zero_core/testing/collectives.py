"""`CollectivesSuite`: what every `Collectives` must do, as tests to subclass. Imports no pytest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Axis, Collectives, CollectivesFactory, RowCollectives
from ..pool import Pool

__all__ = ["CollectivesSuite"]

_SIZES = (1, 7, 1000)  # elements of a shard


class CollectivesSuite:
    """Subclass it in a test module as `class TestX(CollectivesSuite)`; set `collectives` and define `pool`.

    collectives: a factory at the top level of a module, from which the ranks import it.
    gather_tolerance: how far a gather may be off where it need not be exact, relative to the largest magnitude of the
    shard; 0: not at all. reduce_tolerance: likewise of a mean, besides one rounding to the dtype for each rank.
    ranks: with how many ranks everything runs.
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
        for size, numel, dtype in self._cases():
            for in_place in (False, True):
                self._check_gather(self._run(size, "gather", numel, dtype, in_place), numel, dtype)

    def test_an_exact_gather_brings_every_bit(self) -> None:
        for size, numel, _ in self._cases():
            for whole in self._run(size, "gather_exactly", numel):
                assert _same_bits(whole, torch.cat([_noise(rank, numel) for rank in range(size)]))

    def test_a_reduce_scatter_leaves_the_mean_of_each_ranks_row(self) -> None:
        for size, numel, dtype in self._cases():
            found = self._run(size, "reduce", numel, dtype)
            self._check_mean(torch.cat(found), [_values(rank, size * numel, dtype) for rank in range(size)])

    def test_shards_of_different_sizes_are_gathered_and_reduced(self) -> None:
        for size in self.ranks if self.rows else ():
            for dtype in self.dtypes:
                for in_place in (False, True):
                    expected = torch.cat([_values(rank, n, dtype) for rank, n in enumerate(_row_sizes(size))])
                    for whole in self._run(size, "gather_rows", dtype, in_place):
                        assert _same_bits(whole, expected), "a gather of rows brings every bit"
                means = torch.cat(self._run(size, "reduce_rows", dtype))
                self._check_mean(means, [_values(rank, sum(_row_sizes(size)), dtype) for rank in range(size)])

    def test_an_all_reduce_leaves_the_mean_on_every_rank(self) -> None:
        for size, numel, dtype in self._cases():
            found = self._run(size, "average", numel, dtype)
            self._check_mean(found[0], [_values(rank, numel, dtype) for rank in range(size)])
            assert all(_same_bits(each, found[0]) for each in found), "ranks have different bits"

    def test_a_sum_is_in_double_precision(self) -> None:
        for size in self.ranks:
            found = self._run(size, "add_up")
            expected = sum(_values(rank, 5, torch.float64) for rank in range(size))
            torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-14 * size)
            assert all(_same_bits(each, found[0]) for each in found), "ranks have different bits"

    def test_a_broadcast_brings_every_bit_of_its_source(self) -> None:
        for size in self.ranks:
            for source in range(size):
                for dtype in (torch.uint8, torch.int64, torch.float64, *self.dtypes):
                    expected = _values(source, 6, dtype).view(2, 3)
                    for found in self._run(size, "tell", source, dtype):
                        assert _same_bits(found, expected)

    def test_several_are_under_way_at_a_time(self) -> None:
        for size in self.ranks:
            found = self._run(size, "overlap", self.dtypes[0])
            self._check_gather([first for first, _, _ in found], 1000, self.dtypes[0])
            self._check_gather([second for _, second, _ in found], 1000, self.dtypes[0])
            parts = [_values(rank, size * 7, self.dtypes[0]) for rank in range(size)]
            self._check_mean(torch.cat([part for _, _, part in found]), parts)

    def test_ranks_of_a_smaller_group_are_numbered_in_the_group(self) -> None:
        for size in self.ranks:
            if size > 2:
                found = self._run(size, "tell", 1, torch.float64, members=2)[-2:]
                assert all(_same_bits(each, _values(1, 6, torch.float64).view(2, 3)) for each in found)
                self._check_gather(
                    self._run(size, "gather", 7, self.dtypes[0], False, members=2)[-2:], 7, self.dtypes[0]
                )

    # -- what they share ---------------------------------------------------------------------------------------------

    def _cases(self) -> list[tuple[int, int, torch.dtype]]:
        return [(size, numel, dtype) for size in self.ranks for numel in _SIZES for dtype in self.dtypes]

    def _run(self, size: int, check: str, *args: Any, members: int | None = None) -> list[Any]:
        return self.pool(size).run(_on_rank, type(self).collectives, self.device_type, members, check, *args)

    def _check_gather(self, found: Sequence[tuple[Tensor, Tensor]], numel: int, dtype: torch.dtype) -> None:
        """found: of each rank, what it gathered and what it says of its own part."""
        shown = torch.cat([arrives for _, arrives in found])
        for whole, _ in found:
            assert _same_bits(whole, shown), "a rank has other values than arrives_as() says"
        for rank, (_, arrives) in enumerate(found):
            part = _values(rank, numel, dtype).double()
            error = float((arrives.double() - part).abs().max())
            assert error <= self.gather_tolerance * float(part.abs().max()), (rank, numel, dtype, error)

    def _check_mean(self, found: Tensor, values: Sequence[Tensor]) -> None:
        stacked = torch.stack(list(values)).double()
        largest = float(stacked.abs().max())
        allowed = (len(values) * torch.finfo(found.dtype).eps + self.reduce_tolerance) * largest
        error = float((found.double() - stacked.mean(0)).abs().max())
        assert error <= allowed, (len(values), found.numel(), found.dtype, error, allowed)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (10 * torch.randn(numel, generator=generator, dtype=torch.float64)).to(dtype)


def _noise(rank: int, numel: int) -> Tensor:
    """(numel,) float32 of any bits: also of infinities, numbers below the normal ones, and NaNs."""
    generator = torch.Generator().manual_seed(rank)
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64).to(torch.int32)
    return bits.view(torch.float32)


def _row_sizes(size: int) -> list[int]:
    """Of each of `size` ranks: some short, one long, one of a single element."""
    return [(1000, 1, 7, 40)[rank % 4] for rank in range(size)]


class _Filled(Pool):
    """Lends memory that holds something."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        return super().take(numel, dtype).fill_(77)


def _on_rank(factory: CollectivesFactory, device_type: str, members: int | None, check: str, *args: Any) -> Any:
    """Runs on every rank: the method `check` of a _Rank of the last `members`, or of all."""
    world = dist.get_world_size()
    first = world - (members or world)
    group = dist.new_group(list(range(first, world))) if members else dist.group.WORLD
    rank = dist.get_rank() - first
    if rank < 0:
        return None
    device = torch.device(device_type, dist.get_rank()) if device_type != "cpu" else torch.device("cpu")
    pool = _Filled(device)
    collectives = factory(Axis(group, rank, world - first), pool)
    assert isinstance(collectives, Collectives)
    found = getattr(_Rank(collectives, rank, world - first, device), check)(*args)
    assert pool.lent == 0, f"{pool.lent} buffers of the pool were not given back"
    return found


@dataclass
class _Rank:
    """What one rank of a group calls. Results are on the host."""

    collectives: Collectives
    rank: int
    size: int
    device: torch.device

    def values(self, numel: int, dtype: torch.dtype) -> Tensor:
        return _values(self.rank, numel, dtype).to(self.device)

    def gather(self, numel: int, dtype: torch.dtype, in_place: bool) -> tuple[Tensor, Tensor]:
        whole = torch.zeros(self.size * numel, dtype=dtype, device=self.device)
        part = self.values(numel, dtype)
        if in_place:
            part = whole[self.rank * numel : (self.rank + 1) * numel].copy_(part)
        arrives = self.collectives.arrives_as(part).clone()
        self.collectives.all_gather(whole, part, 5, exact=False).wait()
        assert in_place or _same_bits(part, self.values(numel, dtype)), "the shard was written"
        return whole.cpu(), arrives.cpu()

    def gather_exactly(self, numel: int) -> Tensor:
        whole = torch.zeros(self.size * numel, device=self.device)
        self.collectives.all_gather(whole, _noise(self.rank, numel).to(self.device), 5, exact=True).wait()
        return whole.cpu()

    def reduce(self, numel: int, dtype: torch.dtype) -> Tensor:
        part, whole = torch.empty(numel, dtype=dtype, device=self.device), self.values(self.size * numel, dtype)
        self.collectives.reduce_scatter(part, whole, 5).wait()
        assert _same_bits(whole, self.values(self.size * numel, dtype)), "the input was written"
        return part.cpu()

    def gather_rows(self, dtype: torch.dtype, in_place: bool) -> Tensor:
        collectives, sizes = self.collectives, _row_sizes(self.size)
        assert isinstance(collectives, RowCollectives), "set rows = False for collectives of equal shards alone"
        whole, part = torch.zeros(sum(sizes), dtype=dtype, device=self.device), self.values(sizes[self.rank], dtype)
        rows = whole.split(sizes)
        if in_place:
            part = rows[self.rank].copy_(part)
        collectives.all_gather_rows(rows, part, 5).wait()
        assert in_place or _same_bits(part, self.values(sizes[self.rank], dtype)), "the shard was written"
        return whole.cpu()

    def reduce_rows(self, dtype: torch.dtype) -> Tensor:
        collectives, sizes = self.collectives, _row_sizes(self.size)
        assert isinstance(collectives, RowCollectives), "set rows = False for collectives of equal shards alone"
        part, whole = torch.empty(sizes[self.rank], dtype=dtype, device=self.device), self.values(sum(sizes), dtype)
        collectives.reduce_scatter_rows(part, whole.split(sizes), 5).wait()
        assert _same_bits(whole, self.values(sum(sizes), dtype)), "the input was written"
        return part.cpu()

    def average(self, numel: int, dtype: torch.dtype) -> Tensor:
        values = self.values(numel, dtype)
        self.collectives.all_reduce(values, 5).wait()
        return values.cpu()

    def add_up(self) -> Tensor:
        values = self.values(5, torch.float64)
        self.collectives.sum(values, 5)
        return values.cpu()

    def tell(self, source: int, dtype: torch.dtype) -> Tensor:
        values = self.values(6, dtype).view(2, 3)
        self.collectives.broadcast(values, source, 5)
        return values.cpu()

    def overlap(self, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """Two gathers and a reduction begin, a sum comes between, and the last one begun is waited for first."""
        part, whole = self.values(1000, dtype), self.values(self.size * 7, dtype)
        first, second = (torch.zeros(self.size * 1000, dtype=dtype, device=self.device) for _ in range(2))
        reduced = torch.empty(7, dtype=dtype, device=self.device)
        works = [
            self.collectives.all_gather(first, part, 1, exact=False),
            self.collectives.all_gather(second, part, 2, exact=False),
            self.collectives.reduce_scatter(reduced, whole, 3),
        ]
        self.collectives.sum(torch.zeros(2, dtype=torch.float64, device=self.device), 4)
        for work in reversed(works):
            work.wait()
        arrives = self.collectives.arrives_as(part).cpu()
        return (first.cpu(), arrives), (second.cpu(), arrives), reduced.cpu()

"""`CollectivesSuite`: what every `Collectives` must do, as tests to subclass. Imports no pytest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Axis, Collectives, CollectivesFactory
from ..pool import Pool

__all__ = ["CollectivesSuite"]

_SIZES = (1, 7, 1000)  # elements of a shard


class CollectivesSuite:
    """Subclass it in a test module as `class TestX(CollectivesSuite)`; set `collectives` and define `pool`.

    collectives: a factory at the top level of a module, from which the ranks import it.
    gather_tolerance: how far a gather may be off where it need not be exact, relative to the largest magnitude of the
    shard; 0: not at all. reduce_tolerance: likewise of a mean, besides one rounding to the dtype for each rank.
    ranks: with how many ranks everything runs.
    """

    collectives: CollectivesFactory
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
    ranks: Sequence[int] = (1, 2, 3)
    device_type = "cpu"
    gather_tolerance = 0.0
    reduce_tolerance = 1e-6

    def pool(self, size: int) -> Any:
        """A `zero_core.testing.RankPool` of `size` ranks. Keep it between the tests: to start one takes seconds."""
        raise NotImplementedError

    # -- tests -------------------------------------------------------------------------------------------------------

    def test_a_gather_brings_every_shard_to_every_rank(self) -> None:
        for size, numel, dtype in self._cases():
            for in_place in (False, True):
                self._check_gather(self._run(size, _gathered, numel, dtype, in_place), numel, dtype)

    def test_an_exact_gather_brings_every_bit(self) -> None:
        for size, numel, _ in self._cases():
            for whole in self._run(size, _gathered_exactly, numel):
                assert _same_bits(whole, torch.cat([_noise(rank, numel) for rank in range(size)]))

    def test_a_reduce_scatter_leaves_the_mean_of_each_ranks_row(self) -> None:
        for size, numel, dtype in self._cases():
            found = self._run(size, _reduced, numel, dtype)
            self._check_mean(torch.cat(found), [_values(rank, size * numel, dtype) for rank in range(size)])

    def test_an_all_reduce_leaves_the_mean_on_every_rank(self) -> None:
        for size, numel, dtype in self._cases():
            found = self._run(size, _averaged, numel, dtype)
            self._check_mean(found[0], [_values(rank, numel, dtype) for rank in range(size)])
            assert all(_same_bits(each, found[0]) for each in found), "ranks have different bits"

    def test_a_sum_is_in_double_precision(self) -> None:
        for size in self.ranks:
            found = self._run(size, _summed)
            expected = sum(_values(rank, 5, torch.float64) for rank in range(size))
            torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-14 * size)
            assert all(_same_bits(each, found[0]) for each in found), "ranks have different bits"

    def test_a_broadcast_brings_every_bit_of_its_source(self) -> None:
        for size in self.ranks:
            for source in range(size):
                for dtype in (torch.uint8, torch.int64, torch.float64, *self.dtypes):
                    expected = _values(source, 6, dtype).view(2, 3)
                    for found in self._run(size, _told, source, dtype):
                        assert _same_bits(found, expected)

    def test_several_are_under_way_at_a_time(self) -> None:
        for size in self.ranks:
            found = self._run(size, _overlapping, self.dtypes[0])
            self._check_gather([first for first, _, _ in found], 1000, self.dtypes[0])
            self._check_gather([second for _, second, _ in found], 1000, self.dtypes[0])
            parts = [_values(rank, size * 7, self.dtypes[0]) for rank in range(size)]
            self._check_mean(torch.cat([part for _, _, part in found]), parts)

    def test_ranks_of_a_smaller_group_are_numbered_in_the_group(self) -> None:
        for size in self.ranks:
            if size > 2:
                self.pool(size).run(_in_the_last_two, type(self).collectives, self.device_type)

    # -- what they share ---------------------------------------------------------------------------------------------

    def _cases(self) -> list[tuple[int, int, torch.dtype]]:
        return [(size, numel, dtype) for size in self.ranks for numel in _SIZES for dtype in self.dtypes]

    def _run(self, size: int, check: Callable[..., Any], *args: Any) -> list[Any]:
        return self.pool(size).run(_on_rank, type(self).collectives, self.device_type, check, *args)

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


class _Watched(Pool):
    """Counts what is lent."""

    lent = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.lent += 1
        return super().take(numel, dtype).fill_(77)  # whatever it held before

    def give(self, tensor: Tensor) -> None:
        self.lent -= 1
        super().give(tensor)


# What follows runs on the ranks: (collectives, rank, size, device, ...), each returning tensors of the host.


def _on_rank(factory: CollectivesFactory, device_type: str, check: Callable[..., Any], *args: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device(device_type, rank) if device_type != "cpu" else torch.device("cpu")
    pool = _Watched(device)
    collectives = factory(Axis(dist.group.WORLD, rank, size), pool)
    assert isinstance(collectives, Collectives)
    found = check(collectives, rank, size, device, *args)
    assert pool.lent == 0, f"{pool.lent} buffers of the pool were not given back"
    return found


def _gathered(
    collectives: Collectives, rank: int, size: int, device: torch.device, numel: int, dtype: torch.dtype, in_place: bool
) -> tuple[Tensor, Tensor]:
    whole = torch.zeros(size * numel, dtype=dtype, device=device)
    values = _values(rank, numel, dtype).to(device)
    part = whole[rank * numel : (rank + 1) * numel].copy_(values) if in_place else values
    arrives = collectives.arrives_as(part).clone()
    collectives.all_gather(whole, part, 5, exact=False).wait()
    assert in_place or _same_bits(part.cpu(), _values(rank, numel, dtype)), "the shard was written"
    return whole.cpu(), arrives.cpu()


def _gathered_exactly(collectives: Collectives, rank: int, size: int, device: torch.device, numel: int) -> Tensor:
    whole = torch.zeros(size * numel, device=device)
    part = _noise(rank, numel).to(device)
    collectives.all_gather(whole, part, 5, exact=True).wait()
    return whole.cpu()


def _reduced(
    collectives: Collectives, rank: int, size: int, device: torch.device, numel: int, dtype: torch.dtype
) -> Tensor:
    part, whole = torch.empty(numel, dtype=dtype, device=device), _values(rank, size * numel, dtype).to(device)
    collectives.reduce_scatter(part, whole, 5).wait()
    assert _same_bits(whole.cpu(), _values(rank, size * numel, dtype)), "the input was written"
    return part.cpu()


def _averaged(
    collectives: Collectives, rank: int, size: int, device: torch.device, numel: int, dtype: torch.dtype
) -> Tensor:
    values = _values(rank, numel, dtype).to(device)
    collectives.all_reduce(values, 5).wait()
    return values.cpu()


def _summed(collectives: Collectives, rank: int, size: int, device: torch.device) -> Tensor:
    values = _values(rank, 5, torch.float64).to(device)
    collectives.sum(values, 5)
    return values.cpu()


def _told(
    collectives: Collectives, rank: int, size: int, device: torch.device, source: int, dtype: torch.dtype
) -> Tensor:
    values = _values(rank, 6, dtype).view(2, 3).to(device)
    collectives.broadcast(values, source, 5)
    return values.cpu()


def _overlapping(
    collectives: Collectives, rank: int, size: int, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Two gathers and a reduction begin, a small sum comes between, and the last one begun is waited for first."""
    part = _values(rank, 1000, dtype).to(device)
    first, second = (torch.zeros(size * 1000, dtype=dtype, device=device) for _ in range(2))
    reduced, whole = torch.empty(7, dtype=dtype, device=device), _values(rank, size * 7, dtype).to(device)
    works = [
        collectives.all_gather(first, part, 1, exact=False),
        collectives.all_gather(second, part, 2, exact=False),
        collectives.reduce_scatter(reduced, whole, 3),
    ]
    collectives.sum(torch.zeros(2, dtype=torch.float64, device=device), 4)
    for work in reversed(works):
        work.wait()
    arrives = collectives.arrives_as(part).cpu()
    return (first.cpu(), arrives), (second.cpu(), arrives), reduced.cpu()


def _in_the_last_two(factory: CollectivesFactory, device_type: str) -> None:
    size, rank = dist.get_world_size(), dist.get_rank() - (dist.get_world_size() - 2)
    device = torch.device(device_type, dist.get_rank()) if device_type != "cpu" else torch.device("cpu")
    group = dist.new_group([size - 2, size - 1])
    if rank >= 0:
        collectives = factory(Axis(group, rank, 2), Pool(device))
        values = _told(collectives, rank, 2, device, 1, torch.float64)
        assert _same_bits(values.view(-1), _values(1, 6, torch.float64))
        torch.testing.assert_close(
            _summed(collectives, rank, 2, device), sum(_values(r, 5, torch.float64) for r in (0, 1))
        )
        _gathered(collectives, rank, 2, device, 7, torch.float32, False)
        dist.destroy_process_group(group)

"""The allocator against a model: disjoint, aligned, nothing lost."""

import errno
import random

import pytest

from zero_nvme import Extent, NvmeError
from zero_nvme.extents import Allocator


def test_random_sequences_lose_nothing():
    for seed in range(20):
        generator = random.Random(seed)
        allocator = Allocator(4096)
        allocator.grow(1 << 20)
        live = []
        for _ in range(300):
            if live and generator.random() < 0.5:
                allocator.free(live.pop(generator.randrange(len(live))))
            else:
                try:
                    live.append(allocator.allocate(generator.randrange(0, 60000)))
                except NvmeError as error:
                    assert error.errno == errno.ENOSPC and error.got < error.wanted
            ends = [(e.offset_bytes, e.offset_bytes + allocator.rounded(max(1, e.nbytes))) for e in live]
            ends.sort()
            assert all(start % 4096 == 0 and stop <= 1 << 20 for start, stop in ends)
            assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False))
        for extent in live:
            allocator.free(extent)
        assert allocator.allocate(1 << 20) == Extent(0, 1 << 20)  # nothing is lost, and all holes merged


def test_foreign_and_freed_extents_are_refused():
    allocator = Allocator(4096)
    allocator.grow(1 << 16)
    extent = allocator.allocate(100)
    for wrong in (Extent(4096, 100), Extent(0, 99)):
        with pytest.raises(ValueError, match="not allocated"):
            allocator.free(wrong)
    allocator.free(extent)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(extent)


def test_growth_joins_the_last_hole():
    allocator = Allocator(4096)
    allocator.grow(8192)
    allocator.allocate(4096)
    assert allocator.missing(4096) == 0 and allocator.missing(8192) == 4096
    with pytest.raises(NvmeError, match=r"reserve\(\) more, or free extents first"):
        allocator.allocate(8192)
    allocator.grow(12288)
    assert allocator.missing(8192) == 0 and allocator.allocate(8192) == Extent(4096, 8192)

"""Allocates extents from one range of bytes, and spreads that range over paths. Integers only."""

from __future__ import annotations

import bisect
import errno
from collections.abc import Sequence
from dataclasses import dataclass

from zero_nvme.errors import NvmeError

MAX_PERIOD = 16  # units; weights are honoured to about 1/16


@dataclass(frozen=True)
class Extent:
    """A part of a slab. `nbytes` is the size asked for; the reserved size is rounded up to the alignment."""

    offset_bytes: int
    nbytes: int


class Allocator:
    """Allocates the first hole that is large enough. Holes are sorted and merge when they touch.

    Only check() may be called without a lock.
    """

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self.capacity_bytes = 0
        self._holes: list[tuple[int, int]] = []  # (start, stop), sorted, disjoint, not touching
        self._taken: dict[int, int] = {}  # offset -> bytes asked for

    def rounded(self, nbytes: int) -> int:
        """Returns the bytes that are reserved for an extent of `nbytes`, at least one unit of alignment."""
        return -(-max(nbytes, 1) // self._alignment) * self._alignment

    def grow(self, capacity_bytes: int) -> None:
        if capacity_bytes > self.capacity_bytes:
            start, self.capacity_bytes = self.capacity_bytes, capacity_bytes
            self._release(start, capacity_bytes)

    def missing(self, nbytes: int) -> int:
        """Returns the bytes that have to be added at the end to make room for an extent, 0 if there is room."""
        wanted = self.rounded(nbytes)
        if any(stop - start >= wanted for start, stop in self._holes):
            return 0
        start, stop = self._holes[-1] if self._holes else (0, 0)
        return wanted - (stop - start) if stop == self.capacity_bytes else wanted

    def allocate(self, nbytes: int) -> Extent:
        """Returns an extent. Raises NvmeError (ENOSPC) with the bytes wanted, free, and in the largest hole."""
        wanted = self.rounded(nbytes)
        for index, (start, stop) in enumerate(self._holes):
            if stop - start >= wanted:
                if stop - start == wanted:
                    del self._holes[index]
                else:
                    self._holes[index] = (start + wanted, stop)
                self._taken[start] = nbytes
                return Extent(start, nbytes)
        free = sum(stop - start for start, stop in self._holes)
        largest = max((stop - start for start, stop in self._holes), default=0)
        raise NvmeError(
            errno.ENOSPC,
            f"no room for an extent of {wanted} bytes: {free} of {self.capacity_bytes} are free, "
            f"{largest} in one piece; reserve() more, or free extents first",
            wanted=wanted,
            got=largest,
        )

    def claim(self, offset_bytes: int, nbytes: int) -> Extent:
        """Returns the extent at this place. Raises ValueError unless all of it is in one hole."""
        stop = offset_bytes + self.rounded(nbytes)
        for index, hole in enumerate(self._holes):
            if hole[0] <= offset_bytes and stop <= hole[1] and offset_bytes % self._alignment == 0:
                left = [(hole[0], offset_bytes), (stop, hole[1])]
                self._holes[index : index + 1] = [(first, last) for first, last in left if first < last]
                self._taken[offset_bytes] = nbytes
                return Extent(offset_bytes, nbytes)
        raise ValueError(
            f"bytes [{offset_bytes}, {stop}) are no free extent of this slab of {self.capacity_bytes} bytes; "
            "claim each extent once, before others are allocated"
        )

    def check(self, extent: Extent) -> None:
        """Raises ValueError for an extent that is not allocated here. One look into a dict needs no lock."""
        if self._taken.get(extent.offset_bytes) != extent.nbytes:
            raise ValueError(f"{extent} is not allocated in this slab; it was freed, or belongs to another one")

    def free(self, extent: Extent) -> None:
        self.check(extent)
        del self._taken[extent.offset_bytes]
        self._release(extent.offset_bytes, extent.offset_bytes + self.rounded(extent.nbytes))

    def _release(self, start: int, stop: int) -> None:
        index = bisect.bisect_left(self._holes, (start, stop))
        if index < len(self._holes) and self._holes[index][0] == stop:
            stop = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            start = self._holes.pop(index - 1)[0]
            index -= 1
        self._holes.insert(index, (start, stop))


def pattern_of(weights: Sequence[float]) -> list[int]:
    """Returns one period of units as indices of paths, spread evenly: weights [2, 1] give [0, 1, 0].

    Raises ValueError for a weight that is not positive.
    """
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights={list(weights)} must all be positive, one for each path")
    best: list[int] = []
    best_error = float("inf")
    total = sum(weights)
    for period in range(len(weights), max(MAX_PERIOD, 2 * len(weights)) + 1):
        counts = [max(1, round(weight / total * period)) for weight in weights]
        length = sum(counts)
        error = sum(abs(count / length - weight / total) for count, weight in zip(counts, weights, strict=True))
        if error < best_error - 1e-9:
            best, best_error = counts, error
    return _interleave(best)


def _interleave(counts: Sequence[int]) -> list[int]:
    """Interleaves by smooth weighted round-robin: the path that is furthest behind its share goes next."""
    credit = [0] * len(counts)
    pattern = []
    for _ in range(sum(counts)):
        for index, count in enumerate(counts):
            credit[index] += count
        chosen = max(range(len(counts)), key=lambda index: (credit[index], -index))
        credit[chosen] -= sum(counts)
        pattern.append(chosen)
    return pattern


def bytes_per_path(nbytes: int, pattern: Sequence[int], unit_bytes: int, paths: int) -> list[int]:
    """Returns the bytes that each path's file needs to hold the first `nbytes` of the striped range."""
    if len(pattern) == 1:
        return [nbytes]
    units = -(-nbytes // unit_bytes)
    whole, rest = divmod(units, len(pattern))
    return [(whole * pattern.count(path) + list(pattern[:rest]).count(path)) * unit_bytes for path in range(paths)]

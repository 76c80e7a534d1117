"""Extents of one range of bytes: who has which. Integers only; not thread-safe but for check()."""

from __future__ import annotations

import bisect
import errno
from dataclasses import dataclass

from zero_nvme.errors import NvmeError


@dataclass(frozen=True)
class Extent:
    """A part of a slab. `nbytes` is what was asked for; what is reserved is rounded up to the alignment."""

    offset_bytes: int
    nbytes: int


class Allocator:
    """First fit over sorted holes, which merge when they touch."""

    def __init__(self, alignment: int) -> None:
        self._alignment = alignment
        self._capacity = 0
        self._holes: list[tuple[int, int]] = []  # (start, stop), sorted, disjoint, not touching
        self._taken: dict[int, tuple[int, int]] = {}  # offset -> (bytes reserved, bytes asked for)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity

    @property
    def taken_bytes(self) -> int:
        return sum(reserved for reserved, _ in self._taken.values())

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment

    def grow(self, capacity_bytes: int) -> None:
        if capacity_bytes > self._capacity:
            start, self._capacity = self._capacity, capacity_bytes
            self._release(start, capacity_bytes)

    def room_at_end(self) -> int:
        """Free bytes that touch the end: growing by the rest makes room for more."""
        if self._holes and self._holes[-1][1] == self._capacity:
            return self._capacity - self._holes[-1][0]
        return 0

    def fits(self, nbytes: int) -> bool:
        wanted = self.rounded(max(nbytes, 1))
        return any(stop - start >= wanted for start, stop in self._holes)

    def allocate(self, nbytes: int) -> Extent:
        """Raises NvmeError ENOSPC with the bytes wanted, free and in the largest hole."""
        wanted = self.rounded(max(nbytes, 1))
        for index, (start, stop) in enumerate(self._holes):
            if stop - start >= wanted:
                if stop - start == wanted:
                    del self._holes[index]
                else:
                    self._holes[index] = (start + wanted, stop)
                self._taken[start] = (wanted, nbytes)
                return Extent(start, nbytes)
        free = sum(stop - start for start, stop in self._holes)
        largest = max((stop - start for start, stop in self._holes), default=0)
        raise NvmeError(
            errno.ENOSPC,
            f"no room for an extent of {wanted} bytes: {free} of {self._capacity} are free, {largest} in one piece; "
            "reserve() more, or free extents first",
            wanted=wanted,
            got=largest,
        )

    def check(self, extent: Extent) -> None:
        """Raises ValueError for an extent that is not allocated here. One look into a dict: needs no lock."""
        if self._taken.get(extent.offset_bytes, (0, -1))[1] != extent.nbytes:
            raise ValueError(f"{extent} is not allocated in this slab; it was freed, or belongs to another one")

    def free(self, extent: Extent) -> None:
        self.check(extent)
        reserved, _ = self._taken.pop(extent.offset_bytes)
        self._release(extent.offset_bytes, extent.offset_bytes + reserved)

    def _release(self, start: int, stop: int) -> None:
        index = bisect.bisect_left(self._holes, (start, stop))
        if index < len(self._holes) and self._holes[index][0] == stop:
            stop = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            start = self._holes.pop(index - 1)[0]
            index -= 1
        self._holes.insert(index, (start, stop))

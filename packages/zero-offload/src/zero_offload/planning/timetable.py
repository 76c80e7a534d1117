"""A forward and a backward unit by unit, on a discrete device: what starts when, who waits for what.

Pure: seconds of work in, seconds of time out. Where those come from is `prediction`'s. It exists because sums do not
tell the ends: the first unit's update and copy have nothing to hide behind, nor has the last gradient's copy to the
host.

[Note: who waits for whom]
    update    u0 | u1 | u2 | ...                          one after another in forward order, from the end of step() on
    swap_in      | c0 | c1 | c2 ...                       unit i after its update, and when it may be prefetched
    compute           | f0 | f1 | f2 ... | b2 | b1 | b0   unit i after its copy
    swap_out                                  | g2 | g1 | g0      two landing buffers: b0 after g2
    the host                                       | n2 | n1 | n0   squares and sums; step() waits for n0
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class UnitWork:
    """Seconds that one unit takes of each resource, and its bytes on the device."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0  # of what the device does not keep
    upload: float = 0.0  # of parameters, in a forward
    upload_again: float = 0.0  # in a backward, where the other direction may be in use
    download: float = 0.0  # of the gradient
    add: float = 0.0  # the host's pass over the gradient
    nbytes: int = 0


def forward_seconds(units: Sequence[UnitWork], prefetch_bytes: int, *, updated: bool) -> float:
    """Of a forward over `units`, in order. `updated`: behind an update that starts with it."""
    ready = copied = done = 0.0
    starts: list[float] = []
    leads = _leads([unit.nbytes for unit in units], prefetch_bytes)
    for unit, lead in zip(units, leads, strict=True):
        ready += unit.update if updated else 0.0
        copied = max(copied, ready, starts[lead] if lead >= 0 else 0.0) + unit.upload
        starts.append(max(done, copied))
        done = starts[-1] + unit.forward
    return done


def backward_seconds(units: Sequence[UnitWork], prefetch_bytes: int, landings: int = 2) -> tuple[float, float]:
    """(of a backward over `units`, given in forward order; from its end until every gradient is added up).

    `landings`: buffers on the device that gradients leave from.
    """
    order = list(reversed(units))
    copied = done = landed = added = 0.0
    starts: list[float] = []
    left: list[float] = []
    leads = _leads([unit.nbytes for unit in order], prefetch_bytes)
    for k, (unit, lead) in enumerate(zip(order, leads, strict=True)):
        copied = max(copied, starts[lead] if lead >= 0 else 0.0) + unit.upload_again
        free = left[k - landings] if k >= landings else 0.0
        starts.append(max(done, copied, free))
        done = starts[-1] + unit.backward
        landed = max(landed, done) + unit.download
        left.append(landed)
        added = max(added, landed) + unit.add
    return done, max(0.0, added - done)


def _leads(sizes: Sequence[int], prefetch_bytes: int) -> list[int]:
    """For each unit, the earliest whose start lets it be prefetched: as many bytes ahead as given, one unit at least.

    -1: the first, which waits for nobody.
    """
    ends = [0, *accumulate(sizes)]
    enough = (bisect_left(ends, end - prefetch_bytes) - 1 for end in ends[1:])
    return [min(k - 1, max(0, lead)) for k, lead in enumerate(enough)]

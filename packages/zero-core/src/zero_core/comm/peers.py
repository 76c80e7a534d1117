"""Collectives as tagged messages between peers, for gloo. Owns what goes to whom; what it is for is `collectives`'s.

[Note: messages on gloo]
gloo pairs the n-th collective of one rank with the n-th of another, whatever they are. Where one rank then sends more
than the other one expects, a thread of gloo's ends the process: no exception, no name. A message is paired by its tag,
here of the kind of collective and the unit, so ranks that crossed wait for each other and `patience` finds out why.
It takes no longer: 33 MB over loopback on 2 ranks are gathered in 18 ms by messages and in 68 by gloo's all-gather
(2 vCPU, 2026-11-22, medians of 8).

[Note: sums on gloo]
gloo's own reduce-scatter takes twice the time of moving the bytes (59 MB over loopback, 2 ranks: 109 ms against 53) and
rounds to the gradient's dtype after every addition. Here ranks send each other slices, as many bytes on the wire, and
each adds up its own in fp32, in the order of the ranks, rounding once. It costs one buffer of a unit's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..pool import Pool
from ..precision import mean_of_rows

__all__ = ["Averaging", "Axis", "Exchange", "Gathering", "add_up", "broadcast"]


@dataclass
class Axis:
    """One dimension of the mesh: this rank's place in it. `group` None: a single rank, no collective is called."""

    group: Any
    rank: int
    size: int

    def others(self) -> list[int]:
        """The ranks to send to, in an order that loads every link equally; reversed, those to hear from."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


class Gathering:
    """rows[r] <- `part` of rank r, on every rank."""

    def __init__(self, rows: Sequence[Tensor], part: Tensor, axis: Axis, tag: int) -> None:
        self._works = _swap([part] * axis.size, rows, axis, tag)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Exchange:
    """part (n,) <- the mean of this rank's row of `whole` (ranks * n,) over the ranks, made when it is waited for."""

    def __init__(self, part: Tensor, whole: Tensor, axis: Axis, tag: int, pool: Pool) -> None:
        self._part, self._pool, self._size = part, pool, axis.size
        self._slices = pool.take(whole.numel(), whole.dtype)
        rows = self._slices.view(axis.size, -1)
        self._works = _swap(whole.view(axis.size, -1).unbind(), rows.unbind(), axis, tag)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        mean_of_rows(self._slices.view(self._size, -1), self._part)
        self._pool.give(self._slices)


class Averaging:
    """values (n,) <- their mean over the ranks: each adds up a slice, then slices are gathered."""

    def __init__(self, values: Tensor, axis: Axis, tag: int, pool: Pool) -> None:
        self._axis, self._tag, self._pool = axis, tag, pool
        self._slices = values.tensor_split(axis.size)
        own = self._slices[axis.rank]
        self._buffer = pool.take(axis.size * own.numel(), own.dtype)
        self._rows = self._buffer.view(axis.size, -1)
        self._works = _swap(self._slices, self._rows.unbind(), axis, tag)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        own = self._slices[self._axis.rank]
        if own.numel():
            mean_of_rows(self._rows, own)
        self._pool.give(self._buffer)
        Gathering(self._slices, own, self._axis, self._tag).wait()


def add_up(values: Tensor, axis: Axis, tag: int) -> None:
    """values <- their sum over the ranks, added in the order of the ranks: the same bits on each."""
    rows = values.new_empty(axis.size, *values.shape).unbind()
    Gathering(rows, values, axis, tag).wait()
    values.copy_(rows[0])
    for row in rows[1:]:
        values.add_(row)


def broadcast(values: Tensor, source: int, axis: Axis, tag: int) -> None:
    """values <- rank `source`'s, along a binomial tree."""
    place, step = (axis.rank - source) % axis.size, 1
    flat = values if values.is_contiguous() else values.contiguous()
    if not flat.numel():
        return
    while step < axis.size and not place & step:
        step <<= 1
    if place:
        work: Any = dist.irecv(flat, group=axis.group, group_src=(axis.rank - step) % axis.size, tag=tag)
        work.wait()
    works: list[Any] = []
    while step := step >> 1:
        if place + step < axis.size:
            works.append(dist.isend(flat, group=axis.group, group_dst=(axis.rank + step) % axis.size, tag=tag))
    for work in works:
        work.wait()
    if flat is not values:
        values.copy_(flat)


def _swap(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], axis: Axis, tag: int) -> list[Any]:
    """Post outgoing[r] to every rank r and incoming[r] from it, and copy this rank's own."""
    works: list[Any] = []
    for other in reversed(axis.others()):
        if incoming[other].numel():
            works.append(dist.irecv(incoming[other], group=axis.group, group_src=other, tag=tag))
    for other in axis.others():
        if outgoing[other].numel():
            works.append(dist.isend(outgoing[other], group=axis.group, group_dst=other, tag=tag))
    if incoming[axis.rank].data_ptr() != outgoing[axis.rank].data_ptr():
        incoming[axis.rank].copy_(outgoing[axis.rank])
    return works

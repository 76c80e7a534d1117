"""Collectives over several machines: what crosses the link between them crosses it once. For gloo, like `peers`.

Owns which ranks share a machine, and the order in which messages are passed on. NCCL does the same by itself.

[Note: inside the machine first]
With l ranks on each of m machines, the i-th ranks of all machines are a column. Of a gather, a rank sends its part to
its column, over the link, and what it has from its column to the ranks of its machine: each part reaches each machine
once, and not l times. Of a reduction, the ranks of a machine first add up what they have for a column, and its rank
there sends each of the others one sum. Sums are made in fp32, in the order of the ranks on a machine and then of the
machines, and travel in fp32: a mean is rounded once, as it is without this, but its additions are in another order.
What the column has must have arrived before it is passed on, so a thread waits for it while the caller computes. It
does one collective after another, in the order of the calls, which is the same on every rank; gathers and reductions
have a thread each.

Bytes that a machine sends over the link, with a unit of P bytes, of all its ranks together: (m - 1) P / m for each
gather and as much for a reduction of fp32, where peers alone send l times that. A 16-bit reduction sends 4 / (2 l) of
what peers send; with two ranks on a machine that is the same, so it is left to them.
"""

from __future__ import annotations

import os
import queue
import socket
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import reached
from ..leaving import Leaving
from ..memory import FP32_BYTES
from ..pool import Pool
from .collectives import Axis
from .peers import MessageCollectives, Messages, broken_off

__all__ = ["MachineCollectives", "exchanged_bytes", "machines_of", "over_gloo"]

_Queue = queue.SimpleQueue[Any]  # of (work, its future), or None to end
_PASSED_ON = 1 << 29  # in a tag: of what a relay sends, whenever it comes to it, and the caller does not
_NUMBER = ("GROUP_RANK", "SLURM_NODEID")  # of this rank's machine, by torchrun and by SLURM
_NUMEL = 1 << 18  # of fp32 scratch: half a core's second-level cache


def over_gloo(axis: Axis, pool: Pool) -> MessageCollectives:
    """What a gloo group gets: `MachineCollectives` where it has several ranks on each of several machines."""
    machines = machines_of(axis)
    return MessageCollectives(axis, pool) if machines is None else MachineCollectives(axis, pool, machines)


def machines_of(axis: Axis) -> list[list[int]] | None:
    """The ranks of the group by machine. None: there is nothing to gain, or machines have different numbers of them.

    Collective.
    """
    if axis.size < 4:  # the same on every rank: what follows is a collective
        return None
    names: list[Any] = [None] * axis.size
    number = next((os.environ[name] for name in _NUMBER if name in os.environ), "")
    with reached(axis.rank, axis.size):
        dist.all_gather_object(names, f"{socket.gethostname()} {number}", group=axis.group)
    found = [[rank for rank, name in enumerate(names) if name == each] for each in dict.fromkeys(names)]
    even = len({len(ranks) for ranks in found}) == 1
    return found if even and len(found) > 1 and len(found[0]) > 1 else None


def _sums_first(local: int, itemsize: int) -> bool:
    """Whether one fp32 sum is fewer bytes than the gradients of `local` ranks."""
    return local > 1 and local * itemsize > FP32_BYTES


def exchanged_bytes(
    numel: int, itemsize: int, ranks: int, local: int = 1, numels: tuple[int, int] | None = None
) -> int:
    """Bytes of the pool that a reduction of `numel` elements takes, over `ranks` ranks, `local` on each machine.

    numels: the elements of this rank's shard and of the longest one, where shards are not equal.
    """
    adds = ranks > local and _sums_first(local, itemsize)
    if numels is not None:
        numel = ranks * (max(numels) if adds else numels[0])
    whole = numel * itemsize
    return whole + numel // local * (FP32_BYTES - itemsize) if adds and itemsize < FP32_BYTES else whole


class MachineCollectives(MessageCollectives):
    """`machines`: the ranks of the group on each machine, as many on every one. See [Note: inside the machine first].

    A reduction takes a buffer of the pool until it is waited for, of `exchanged_bytes`.
    """

    def __init__(self, axis: Axis, pool: Pool, machines: Sequence[Sequence[int]]) -> None:
        super().__init__(axis, pool)
        (here,) = (ranks for ranks in machines if self._rank in ranks)
        self._local = list(here)
        self._columns = {rank: [ranks[place] for ranks in machines] for place, rank in enumerate(here)}
        self._column = self._columns[self._rank]
        self._gathers, self._reductions = (
            _Relay(f"zero-core {kind}", self._group) for kind in ("gathers", "reductions")
        )

    def _others(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank != self._rank]

    def _shared(self, own: Tensor, rows: Sequence[Tensor], tag: int) -> Messages:
        beside, across = self._others(self._local), self._others(self._column)
        if rows[self._rank].data_ptr() != own.data_ptr():
            rows[self._rank].copy_(own)
        local = [self._receive(rows[rank], rank, tag) for rank in beside if rows[rank].numel()]
        local += [
            self._receive(rows[r], rank, tag ^ _PASSED_ON)
            for rank in beside
            for r in self._columns[rank]
            if r != rank and rows[r].numel()
        ]
        link = [self._receive(rows[rank], rank, tag) for rank in across if rows[rank].numel()]
        if own.numel():
            link += [self._send(own, rank, tag) for rank in across]
            local += [self._send(own, rank, tag) for rank in beside]

        def pass_on() -> None:
            Messages(link).wait()
            passed = tag ^ _PASSED_ON
            sent = [self._send(rows[r], rank, passed) for r in across for rank in beside if rows[r].numel()]
            Messages(sent + local).wait()

        return Messages([self._gathers.do(pass_on)])

    def _averaged(
        self, outgoing: Sequence[Tensor], own: Tensor, tag: int, then: Callable[[], None] | None = None
    ) -> Messages:
        if not _sums_first(len(self._local), own.itemsize):
            return super()._averaged(outgoing, own, tag, then)
        beside, across = self._others(self._local), self._others(self._column)
        longest = max(row.numel() for row in outgoing)
        count, narrow = len(self._column), own.dtype != torch.float32
        nbytes = exchanged_bytes(longest * self._size, own.itemsize, self._size, len(self._local))
        buffer = self._pool.take(nbytes, torch.uint8)
        # Of fp32, sums are made in the memory of the first values. What comes from the column lies behind them, where
        # values have lain that are added up.
        behind = count * longest * FP32_BYTES
        sums, incoming = _rows(buffer, count, longest), _rows(buffer[behind:], count - 1, longest)
        parts = buffer[behind if narrow else 0 :][: len(beside) * count * longest * own.itemsize].view(own.dtype)
        received = {
            rank: each.unbind() for rank, each in zip(beside, parts.view(len(beside), count, longest), strict=True)
        }
        works = [
            self._receive(received[rank][k][: outgoing[r].numel()], rank, tag)
            for rank in beside
            for k, r in enumerate(self._column)
            if outgoing[r].numel()
        ]
        works += [
            self._send(outgoing[r], rank, tag) for rank in beside for r in self._columns[rank] if outgoing[r].numel()
        ]

        def add_up() -> None:
            Messages(works).wait()
            for k, r in enumerate(self._column):
                numel = outgoing[r].numel()
                values = [(outgoing[r] if rank == self._rank else received[rank][k])[:numel] for rank in self._local]
                _add(sums[k][:numel], values)
            arriving = {rank: incoming[k][: own.numel()] for k, rank in enumerate(across)}
            link = [self._receive(arriving[rank], rank, tag ^ _PASSED_ON) for rank in across if own.numel()]
            link += [
                self._send(sums[k][: outgoing[rank].numel()], rank, tag ^ _PASSED_ON)
                for k, rank in enumerate(self._column)
                if rank != self._rank and outgoing[rank].numel()
            ]
            Messages(link).wait()
            mine = sums[self._column.index(self._rank)][: own.numel()]
            _add(mine, [mine if rank == self._rank else arriving[rank] for rank in self._column])
            own.copy_(mine.div_(self._size))

        def end() -> None:
            self._pool.give(buffer)
            if then is not None:
                then()

        return Messages([self._reductions.do(add_up)], end)


def _rows(memory: Tensor, count: int, numel: int) -> Sequence[Tensor]:
    """`count` times (numel,) fp32 in `memory` (nbytes,)."""
    return memory[: count * numel * FP32_BYTES].view(torch.float32).view(count, numel).unbind()


def _add(total: Tensor, values: Sequence[Tensor]) -> None:
    """total (n,) fp32 <- the sum of `values`, in their order. One of them may be `total`, or the same memory."""
    for start in range(0, total.numel(), _NUMEL):
        part = total[start : start + _NUMEL]
        summed = values[0][start : start + _NUMEL].to(torch.float32, copy=True)
        for each in values[1:]:
            summed.add_(each[start : start + _NUMEL])
        part.copy_(summed)


class _Relay:
    """A thread that does one thing after another, from the first to the end of the process or of this object."""

    def __init__(self, name: str, group: Any) -> None:
        self._asked: _Queue = queue.SimpleQueue()
        self._thread = Leaving(name, partial(_relay, self._asked), partial(_leave, self._asked, group))

    def do(self, work: Callable[[], None]) -> _Done:
        if self._thread.ident is None:
            self._thread.start()
            weakref.finalize(self, self._asked.put, None).atexit = False
        future: Future[None] = Future()
        self._asked.put((work, future))
        return _Done(future)


class _Done:
    """What a relay does, as a Work."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


def _relay(asked: _Queue) -> None:
    while (each := asked.get()) is not None:
        work, future = each
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del each, work, future  # they hold what this thread works for


def _leave(asked: _Queue, group: Any) -> None:
    """A thread that has not taken what it was told before is inside gloo, where nobody waits for it any more."""
    if not asked.empty():
        broken_off(group)
    asked.put(None)

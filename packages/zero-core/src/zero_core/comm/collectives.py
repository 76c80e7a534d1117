"""Defines `Collectives`, the protocol between a sharded model's ranks, and implements it by torch's backend.

A new collective begins here; gloo.py implements it by messages, and ranks.py calls it for units. Owns no group.
`TorchCollectives` knows their names in this version of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from ..pool import Pool


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh: this rank's place in it. `group` None: a single rank, no collective is called."""

    group: Any  # a torch.distributed.ProcessGroup
    rank: int  # in the group
    size: int


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> Any:
        """Returns when the results may be used: on a device with streams, by work queued next on the current stream.

        Called once for every collective, in any order. Raises RuntimeError if the collective failed.
        """


@runtime_checkable
class Collectives(Protocol):
    """Moves values between the ranks of one process group. `zero_core.testing.CollectivesSuite` checks every sentence.

    Tensors are contiguous and on the model's device. With m ranks in the group, `whole` is (m * n,), and its row r is
    `whole[r * n : (r + 1) * n]`. dtypes are float32, bfloat16 and float16 unless a method says otherwise.

    `all_gather`, `reduce_scatter` and `all_reduce` are asynchronous. Until `Work.wait()` returns, the caller neither
    writes their inputs nor reads their outputs, and frees neither. Several may be under way at a time. `sum` and
    `broadcast` return when the result may be used, as `Work.wait()` does. Methods write only their outputs.

    Every rank calls the same methods in the same order, with tensors of equal sizes and the same `tag`, an int from 0
    to 2**30 - 1 which is derived from the collective and the unit. An implementation that pairs messages by it notices
    ranks that crossed. A method may raise RuntimeError, which reaches the user as a CollectiveError with the unit.

    All ranks end up with the same bits in common results: `whole` of a gather, and the results of `all_reduce`, `sum`
    and `broadcast`. Training on several ranks relies on that.
    """

    def all_gather(self, whole: Tensor, part: Tensor, tag: int, *, exact: bool) -> Work:
        """Row r of `whole` <- `part` (n,) of rank r. `part` may be this rank's own row of `whole`.

        Where `exact` is False, rows may be approximations, such as quantised values: those that `arrives_as` returns.
        Where it is True, every bit must arrive: these are the fp32 masters.
        """

    def arrives_as(self, part: Tensor) -> Tensor:
        """Returns this `part` as an inexact gather puts it into every rank's `whole`: (n,), same dtype and bits.

        Returns `part` itself if such a gather is exact too. Calls no collective. An element of a gathered parameter
        that differs was written after it arrived. Only the masters of such elements change, all others keep their
        values.
        """

    def reduce_scatter(self, part: Tensor, whole: Tensor, tag: int) -> Work:
        """`part` (n,) <- the mean over the ranks of this rank's row of `whole`. They share no memory."""

    def all_reduce(self, values: Tensor, tag: int) -> Work:
        """`values` (k,) <- their mean over the ranks, in place. k need not be a multiple of m."""

    def sum(self, values: Tensor, tag: int) -> None:
        """`values` (k,) float64 <- their sum over the ranks, in place. Small: norms, flags, digests."""

    def broadcast(self, values: Tensor, source: int, tag: int) -> None:
        """`values`, of any shape and dtype, <- those of rank `source` of the group, in place, bit for bit."""

    def break_off(self) -> None:
        """Ends the waits of this rank for the group with RuntimeError, if the backend can; else does nothing.

        Called on another thread, after ranks were found to have called different collectives.
        """


@runtime_checkable
class RowCollectives(Protocol):
    """An optional part of `Collectives`: shards of different sizes, as of units with parameters that are needed whole.

    `rows` has a tensor for each rank of the group, of at least one element. Row r has the same size on every rank, and
    the dtype of `part`, which has the size of this rank's row. All else is as `Collectives` says. Without this part,
    `shard` refuses an optimizer that needs whole parameters on several ranks.
    """

    def all_gather_rows(self, rows: Sequence[Tensor], part: Tensor, tag: int) -> Work:
        """`rows[r]` <- `part` of rank r, with every bit. `part` may be this rank's own row."""

    def reduce_scatter_rows(self, part: Tensor, rows: Sequence[Tensor], tag: int) -> Work:
        """`part` <- the mean over the ranks of their `rows[r]`, where r is this rank. They share no memory."""


CollectivesFactory = Callable[[Axis, Pool], Collectives]
"""Makes the collectives of one group with more than one rank, when `shard` is called, on every rank of that group.

The pool lends scratch memory: `pool.take(numel, dtype)`, `pool.give(tensor)`. It is given back in `Work.wait()`.
"""


# torch 2.13 renames the two; older versions have only the former names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TorchCollectives:
    """For a backend that averages, such as NCCL. It pairs the n-th calls of the ranks, so tags are not used."""

    def __init__(self, axis: Axis, pool: Pool) -> None:
        self._group = axis.group

    def all_gather(self, whole: Tensor, part: Tensor, tag: int, *, exact: bool) -> Any:
        return _all_gather(whole, part, group=self._group, async_op=True)

    def all_gather_rows(self, rows: Sequence[Tensor], part: Tensor, tag: int) -> Any:
        return dist.all_gather(list(rows), part, group=self._group, async_op=True)

    def arrives_as(self, part: Tensor) -> Tensor:
        return part

    def reduce_scatter(self, part: Tensor, whole: Tensor, tag: int) -> Any:
        return _reduce_scatter(part, whole, op=dist.ReduceOp.AVG, group=self._group, async_op=True)

    def reduce_scatter_rows(self, part: Tensor, rows: Sequence[Tensor], tag: int) -> Any:
        return dist.reduce_scatter(part, list(rows), op=dist.ReduceOp.AVG, group=self._group, async_op=True)

    def all_reduce(self, values: Tensor, tag: int) -> Any:
        return dist.all_reduce(values, op=dist.ReduceOp.AVG, group=self._group, async_op=True)

    def sum(self, values: Tensor, tag: int) -> None:
        dist.all_reduce(values, group=self._group)

    def broadcast(self, values: Tensor, source: int, tag: int) -> None:
        dist.broadcast(values, group=self._group, group_src=source)

    def break_off(self) -> None:
        """No-op: the host does not wait inside these collectives, and the backend's watchdog ends them."""

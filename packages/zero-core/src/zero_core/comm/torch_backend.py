"""Calls the collectives of torch.distributed's backend. Owns their names in this version of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..pool import Pool
from .collectives import Axis

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

"""The ranks of a sharded model and the collectives between them. One call each; no unit's state, no schedule.

[Note: crossing collectives]
Two ranks that call collectives of one size in different orders exchange wrong data without an error. Every collective
here therefore extends a short digest (which unit, which kind, in which order). The digests ride with the norm's
all-reduce, and `step()` raises before it updates anything if they differ. On gloo such ranks wait for each other
instead, and `patience` raises on each, see [Note: messages on gloo] and [Note: crossing ranks].
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..device import backend_in, has_streams
from ..errors import CollectiveError, StageError
from ..pool import Pool
from ..streams import Side
from .patience import Patience, break_off
from .peers import Averaging, Axis, Exchange, Gathering, add_up, broadcast

__all__ = ["Ranks"]

_DIGEST_BITS = 20  # squares of digests are summed over ranks in float64: exact below 2^53


class Ranks:
    """A mesh (replicate, shard): parameters are cut along `shard`, gradients are averaged over both."""

    def __init__(self, shard: Axis, replicate: Axis, rank: int, size: int, device: torch.device) -> None:
        self.shard, self.replicate = shard, replicate
        self.rank, self.size = rank, size
        self.device = device
        self.side = Side(device)  # where gathers ahead wait, see [Note: streams]
        self.digest = 0
        self.sent_numel: Counter[str] = Counter()  # elements this rank sends, by collective; a ring's share
        self._everyone = Axis(dist.group.WORLD if size > 1 else None, rank, size)
        groups = [axis.group for axis in (shard, replicate, self._everyone) if axis.group is not None]
        self._by_messages = bool(groups) and all(backend_in(group, device) == "gloo" for group in groups)
        self.patience = Patience(rank, size, partial(break_off, groups if self._by_messages else []))

    @classmethod
    def build(cls, mesh: Any, *, sharded: bool, device: torch.device) -> Ranks:
        """From a DeviceMesh of one or two dimensions, the default process group, or nothing at all."""
        alone = Axis(None, 0, 1)
        if mesh is None:
            if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
                return cls(alone, alone, 0, 1, device)
            axis = Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())
            pair = (axis, alone) if sharded else (alone, axis)
            return cls(*pair, axis.rank, axis.size, device)
        axes = [Axis(mesh.get_group(d), mesh.get_local_rank(d), mesh.size(d)) for d in range(mesh.ndim)]
        axes = [axis if axis.size > 1 else alone for axis in axes]
        if mesh.ndim == 1:
            shard, replicate = (axes[0], alone) if sharded else (alone, axes[0])
        elif mesh.ndim == 2 and sharded:
            replicate, shard = axes
        else:
            raise StageError(
                f"mesh of {mesh.ndim} dimensions {tuple(mesh.mesh.shape)}: give one dimension, or two "
                "(replicate, shard) with stage 1, 2 or 3"
            )
        size = mesh.mesh.numel()
        if size not in (1, dist.get_world_size()):
            raise StageError(f"mesh of {size} ranks in a world of {dist.get_world_size()}: it must hold every rank")
        return cls(shard, replicate, dist.get_rank() if size > 1 else 0, size, device)

    def fold(self, value: int) -> None:
        """Extend the digest by something that every rank must do in the same order."""
        self.digest = (self.digest * 31 + value) % (1 << _DIGEST_BITS)

    @contextmanager
    def _naming(self, collective: str, unit: str, index: int) -> Iterator[int]:
        """Call a collective inside. Yields the tag of its messages."""
        self.fold(index * 8 + len(collective) + 1)
        self.patience.called(collective, unit)
        try:
            with self.patience.waiting(collective, unit):
                yield zlib.crc32(f"{collective} of {unit}".encode()) >> 2
        except RuntimeError as error:
            raise self.failure(collective, unit, error) from error

    def failure(self, collective: str, unit: str, error: BaseException) -> CollectiveError:
        reason = f"{error}. A rank stopped, or left the common order of units"
        with suppress(RuntimeError, OSError):  # the store is gone with the rank that has it
            reason = self.patience.crossing() or reason
        return CollectiveError(
            f"{collective} of unit {unit!r} failed on rank {self.rank} of {self.size}: {reason}; every rank must run "
            "the same units in the same order (zero_core.gathered avoids that)"
        )

    def wait(self, work: Any, collective: str, unit: str) -> None:
        """Wait for an asynchronous collective; its failure names the unit."""
        if work is None:
            return
        try:
            with self.patience.waiting(collective, unit):
                work.wait()
        except RuntimeError as error:
            raise self.failure(collective, unit, error) from error

    def meet(self, what: str) -> None:
        """Wait until every rank has made this call."""
        self.sum_everywhere(self.numbers([0.0]), what)

    def all_gather(self, whole: Tensor, part: Tensor, unit: str, index: int) -> Any:
        """whole (shard.size * n,) <- part (n,) of every shard rank; returns the work to wait for."""
        self.sent_numel["all_gather"] += part.numel() * (self.shard.size - 1)
        with self._naming("all_gather", unit, index) as tag:
            if self._by_messages:
                return Gathering(whole.view(self.shard.size, -1).unbind(), part, self.shard, tag)
            return _all_gather(whole, part, group=self.shard.group, async_op=True)

    def reduce_scatter(self, part: Tensor, whole: Tensor, unit: str, index: int, pool: Pool) -> Any:
        """part (n,) <- this rank's slice of the mean of `whole` over the shard ranks; returns the work to wait for.

        `pool` lends memory until then, see [Note: sums on gloo].
        """
        self.sent_numel["reduce_scatter"] += part.numel() * (self.shard.size - 1)
        with self._naming("reduce_scatter", unit, index) as tag:
            if self._by_messages:
                return Exchange(part, whole, self.shard, tag, pool)
            return _reduce_scatter(part, whole, op=dist.ReduceOp.AVG, group=self.shard.group, async_op=True)

    def average_replicas(self, values: Tensor, unit: str, index: int, pool: Pool) -> Any:
        """values (n,) <- their mean over the replicas; returns the work. `pool` lends memory until then."""
        self.sent_numel["all_reduce"] += 2 * values.numel() * (self.replicate.size - 1) // self.replicate.size
        with self._naming("all_reduce", unit, index) as tag:
            if self._by_messages:
                return Averaging(values, self.replicate, tag, pool)
            return dist.all_reduce(values, op=dist.ReduceOp.AVG, group=self.replicate.group, async_op=True)

    def numbers(self, values: Sequence[float]) -> Tensor:
        """(n,) float64 on the device. The host does not wait for it: from memory that is not pinned, it would."""
        if not has_streams(self.device):
            return torch.tensor(values, dtype=torch.float64, device=self.device)
        return torch.tensor(values, dtype=torch.float64, pin_memory=True).to(self.device, non_blocking=True)

    def later(self, values: Tensor) -> Callable[[], list[float]]:
        """What reads `values` (n,) on the host, which then waits for what is queued by now and for nothing after it."""
        if not has_streams(self.device):
            return values.tolist
        module = torch.get_device_module(self.device)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = module.Event()
        copied.record(module.current_stream(self.device))

        def read() -> list[float]:
            copied.synchronize()
            return host.tolist()

        return read

    def sum_everywhere(self, values: Tensor, what: str) -> Tensor:
        """values <- their sum over all ranks of the mesh, in place."""
        if self.size > 1:
            with self._naming("all_reduce", what, 0) as tag:
                add_up(values, self._everyone, tag) if self._by_messages else dist.all_reduce(values)
        return values

    def agree(self, value: int, what: str) -> bool:
        """Whether all ranks of the mesh have the same `value`, of which the lowest bits are compared."""
        value %= 1 << _DIGEST_BITS
        sums = self.numbers([value, value * value])
        total, squares = self.sum_everywhere(sums, what).tolist()
        return squares * self.size == total * total

    def broadcast(self, values: Tensor, unit: str, source: int = 0) -> Tensor:
        """values <- rank `source`'s, in place."""
        if self.size > 1:
            with self._naming("broadcast", unit, 0) as tag:
                if self._by_messages:
                    broadcast(values, source, self._everyone, tag)
                else:
                    dist.broadcast(values, src=source)
        return values


def _all_gather(whole: Tensor, part: Tensor, **options: Any) -> Any:
    # torch 2.13 renames the two; older versions have only the former names.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, part, **options)


def _reduce_scatter(part: Tensor, whole: Tensor, **options: Any) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(part, whole, **options)

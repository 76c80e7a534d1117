"""Gathers and reduces the units of a sharded model through `Collectives`. No unit's state, no schedule.

[Note: crossing collectives]
Two ranks that call collectives of one size in different orders exchange wrong data without an error. Every collective
here therefore extends a short digest (which unit, which kind, in which order). The digests ride with the norm's
all-reduce, and `step()` raises before it updates anything if they differ. On gloo such ranks wait for each other
instead, and `patience` raises on each, see [Note: messages on gloo] and [Note: crossing ranks].
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..device import Side, backend_in, sent
from ..errors import CollectiveError, ConfigError, StageError, reached
from ..pool import Pool
from .collectives import Axis, CollectivesFactory, RowCollectives, TorchCollectives, Work
from .gloo import MessageCollectives, broken_off
from .watchdog import Patience

BY_BACKEND: dict[str, CollectivesFactory] = {"gloo": MessageCollectives}  # of other backends: TorchCollectives

ALONE = Axis(None, 0, 1)
BLANK = "append a blank input to the end of a sample, such as a black image, with attention_mask 0 and labels -100"
_DIGEST_BITS = 20  # squares of digests are summed over ranks in float64: exact below 2^53
_NUMBER = ("GROUP_RANK", "SLURM_NODEID")  # of this rank's machine, by torchrun and by SLURM


def default_timeout(device: torch.device) -> timedelta | None:
    """Returns the default group's time-out. torch gives a new group 30 minutes instead."""
    everyone: Any = dist.group.WORLD
    return getattr(getattr(everyone._get_backend(device), "options", None), "_timeout", None)


def mesh_of_replicas(replicas: int) -> DeviceMesh:
    """Returns a mesh (replicas, ranks / replicas): each shard group has consecutive ranks, and the default time-out.

    On the accelerator, or over gloo on the CPU. Raises ConfigError for groups of unequal sizes. Collective.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % replicas:
        raise ConfigError(
            f"replicas={replicas} does not divide {world} rank{'s' if world > 1 else ''} into groups of one size: "
            f"start a multiple of {replicas} ranks with torchrun, or write another number of replicas"
        )
    accelerator = None if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    device = "cpu" if accelerator is None else accelerator.type
    made = init_device_mesh(device, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    if (timeout := default_timeout(torch.device(device))) is not None:
        for dimension in range(made.ndim):
            dist.distributed_c10d._set_pg_timeout(timeout, made.get_group(dimension))
    return made


def machines_of(axis: Axis) -> list[list[int]] | None:
    """Returns the ranks of the group by machine. None unless there are several machines with the same number, above 1.

    Collective.
    """
    if axis.size < 4:  # the same on every rank, because a collective follows
        return None
    names: list[Any] = [None] * axis.size
    number = next((os.environ[name] for name in _NUMBER if name in os.environ), "")
    with reached(axis.rank, axis.size):
        dist.all_gather_object(names, f"{socket.gethostname()} {number}", group=axis.group)
    found = [[rank for rank, name in enumerate(names) if name == each] for each in dict.fromkeys(names)]
    even = len({len(ranks) for ranks in found}) == 1
    return found if even and len(found) > 1 and len(found[0]) > 1 else None


class Ranks:
    """A mesh (replicate, shard): parameters are cut along `shard`, gradients are averaged over both.

    collectives: makes the `Collectives` of each group; None: by `BY_BACKEND` for the group's backend. inside: the shard
    ranks of this machine, if units are also gathered among them.
    """

    def __init__(
        self, shard: Axis, replicate: Axis, pool: Pool, collectives: CollectivesFactory | None, inside: Axis
    ) -> None:
        self.shard, self.replicate, self.inside = shard, replicate, inside
        self.size = size = shard.size * replicate.size
        self.rank = rank = dist.get_rank() if size > 1 else 0
        self.device = device = pool.device
        self.side = Side(device)  # where gathers ahead wait, see [Note: streams]
        self.digest = 0
        self._everyone = Axis(dist.group.WORLD if size > 1 else None, rank, size)
        self._of_group: dict[int, Any] = {}  # Collectives; with RowCollectives, or shard() refuses unequal shards
        for axis in (shard, replicate, self.inside, self._everyone):
            if axis.group is not None and id(axis.group) not in self._of_group:
                make = collectives or BY_BACKEND.get(backend_in(axis.group, device), TorchCollectives)
                self._of_group[id(axis.group)] = make(axis, pool)
        self.patience = Patience(rank, size, self._break_off)
        self._beside: Any = None

    @classmethod
    def build(
        cls, mesh: Any, pool: Pool, *, sharded: bool, collectives: CollectivesFactory | None, secondary: bool
    ) -> Ranks:
        """Builds it from a DeviceMesh of one or two dimensions, the default process group, or one rank alone.

        secondary: makes `inside`, a group for each machine. Raises StageError with a mesh, and unless several machines
        have several ranks each.
        """
        inside = ALONE
        if secondary:
            found = None
            if mesh is None and dist.is_available() and dist.is_initialized():
                found = machines_of(Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size()))
            if found is None:
                raise StageError(
                    "secondary_shards=True keeps a part of each unit inside a machine, which needs several machines "
                    "with as many ranks each, at least two, and no mesh; a mesh (replicate, shard) keeps gathers "
                    "inside of its shard groups by itself. Leave secondary_shards out here"
                )
            groups = [(dist.new_group(ranks, timeout=default_timeout(pool.device)), ranks) for ranks in found]
            group, mine = next(each for each in groups if dist.get_rank() in each[1])
            inside = Axis(group, mine.index(dist.get_rank()), len(mine))
        if mesh is None:
            if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
                return cls(ALONE, ALONE, pool, collectives, ALONE)
            axes = [Axis(dist.group.WORLD, dist.get_rank(), dist.get_world_size())]
        else:
            axes = [Axis(mesh.get_group(d), mesh.get_local_rank(d), mesh.size(d)) for d in range(mesh.ndim)]
            axes = [axis if axis.size > 1 else ALONE for axis in axes]
        if len(axes) == 1:
            shard, replicate = (axes[0], ALONE) if sharded else (ALONE, axes[0])
        elif len(axes) == 2 and sharded:
            replicate, shard = axes
            place = mesh.mesh.argsort(1).argsort(1)
            if (place != place[0]).any():
                raise StageError(
                    f"mesh {mesh.mesh.tolist()}: torch sorts the ranks of a process group, so that columns would "
                    "average gradients of different shards: sort each row"
                )
        else:
            raise StageError(
                f"mesh of {mesh.ndim} dimensions {tuple(mesh.mesh.shape)}: give one dimension, or two "
                "(replicate, shard) with stage 1, 2 or 3"
            )
        size = shard.size * replicate.size
        if size not in (1, dist.get_world_size()):
            raise StageError(f"mesh of {size} ranks in a world of {dist.get_world_size()}: it must hold every rank")
        return cls(shard, replicate, pool, collectives, inside)

    def fold(self, value: int) -> None:
        """Extends the digest by an action that every rank must do in the same order."""
        self.digest = (self.digest * 31 + value) % (1 << _DIGEST_BITS)

    @contextmanager
    def _naming(self, collective: str, unit: str) -> Iterator[int]:
        """Encloses the call of a collective. Yields the tag of its messages."""
        # Other models have units of the same names: a tag is of this mesh.
        tag = zlib.crc32(f"{self.patience.key} {collective} of {unit}".encode()) >> 2
        self.fold(tag)
        self.patience.called(collective, unit)
        with self._waiting(collective, unit):
            yield tag

    @contextmanager
    def _waiting(self, collective: str, unit: str) -> Iterator[None]:
        """Inside, errors name the unit."""
        try:
            with self.patience.waiting(collective, unit):
                yield
        except RuntimeError as error:
            reason = f"{error}. A rank stopped, or left the common order of units"
            with suppress(RuntimeError, OSError):  # the store is gone with the rank that has it
                reason = self.patience.crossing() or reason
            raise CollectiveError(
                f"{collective} of unit {unit!r} failed on rank {self.rank} of {self.size}: {reason}; every rank must "
                "run the same units in the same order (forwards inside zero_core.gathered may differ). Where a batch "
                "has no input for some units, such as an image tower without an image, shard with "
                "find_unused_parameters=True at stage 0, 1 or 2 "
                f"(a Trainer: ddp_find_unused_parameters=True), or {BLANK}"
            ) from error

    def wait(self, work: Any, collective: str, unit: str) -> None:
        """Waits for an asynchronous collective; its error names the unit."""
        if work is not None:
            with self._waiting(collective, unit):
                work.wait()

    def beside(self) -> Any:
        """Returns a group of all ranks in which another thread exchanges objects; None for one rank.

        Collective at the first call.
        """
        if self.size > 1 and self._beside is None:
            self._beside = dist.new_group(backend="gloo", timeout=default_timeout(self.device))
        return self._beside

    def leave_beside(self) -> None:
        """Makes that thread's waits fail, here and on the other ranks."""
        if self._beside is not None:
            broken_off(self._beside)

    def meet(self, what: str) -> None:
        """Waits until every rank has made this call."""
        self.sum_everywhere(self.numbers([0.0]), what)

    def all_gather(
        self, whole: Tensor, part: Tensor, unit: str, *, exact: bool = False, rows: Sequence[Tensor] | None = None
    ) -> Work:
        """whole (shard.size * n,) <- part (n,) of every shard rank; returns the work to wait for.

        exact: all bits arrive; else values arrive as `arrives_as` returns them. rows: each shard rank's part of
        `whole`, if the parts are not equal; all bits arrive then.
        """
        with self._naming("all_gather", unit) as tag:
            if rows is not None:
                return self._over(self.shard).all_gather_rows(rows, part, tag)
            return self._over(self.shard).all_gather(whole, part, tag, exact=exact)

    def all_gather_inside(self, whole: Tensor, part: Tensor, unit: str) -> Work:
        """whole (inside.size * n,) <- part (n,) of every shard rank of this machine. All bits arrive."""
        with self._naming("all_gather inside the machine", unit) as tag:
            return self._over(self.inside).all_gather(whole, part, tag, exact=True)

    def arrives_as(self, part: Tensor) -> Tensor:
        """Returns (n,) this rank's `part` as it arrives on every shard rank in a gather. Not collective."""
        return part if self.shard.size == 1 else self._over(self.shard).arrives_as(part)

    def reduce_scatter(self, part: Tensor, whole: Tensor, unit: str, *, rows: Sequence[Tensor] | None = None) -> Work:
        """part (n,) <- this rank's slice of the mean of `whole` over the shard ranks; returns the work to wait for.

        rows: the slice of each shard rank, if they are not equal.
        """
        with self._naming("reduce_scatter", unit) as tag:
            if rows is not None:
                return self._over(self.shard).reduce_scatter_rows(part, rows, tag)
            return self._over(self.shard).reduce_scatter(part, whole, tag)

    def average_replicas(self, values: Tensor, unit: str) -> Work:
        """values (n,) <- their mean over the replicas; returns the work to wait for."""
        with self._naming("all_reduce", unit) as tag:
            return self._over(self.replicate).all_reduce(values, tag)

    def numbers(self, values: Sequence[float]) -> Tensor:
        """Returns (n,) float64 on the device. The host does not wait for it."""
        return sent(torch.tensor(values, dtype=torch.float64, device="cpu"), self.device)

    def sum_everywhere(self, values: Tensor, what: str) -> Tensor:
        """values <- their sum over all ranks of the mesh, in place."""
        if self.size > 1:
            with self._naming("all_reduce", what) as tag:
                self._over(self._everyone).sum(values, tag)
        return values

    def anywhere(self, flags: Sequence[bool], what: str) -> list[bool]:
        """Whether any rank of the mesh has True, for each of the flags. Collective, if there are any."""
        if not flags:
            return []
        return [count > 0 for count in self.sum_everywhere(self.numbers([float(f) for f in flags]), what).tolist()]

    def agree(self, value: int, what: str) -> bool:
        """Whether all ranks of the mesh have the same `value`. Only the lowest `_DIGEST_BITS` bits are compared."""
        value %= 1 << _DIGEST_BITS
        sums = self.numbers([value, value * value])
        total, squares = self.sum_everywhere(sums, what).tolist()
        return squares * self.size == total * total

    def broadcast(self, values: Tensor, unit: str, source: int = 0) -> Tensor:
        """values <- rank `source`'s, in place."""
        if self.size > 1 and values.numel():
            with self._naming("broadcast", unit) as tag:
                flat = values.contiguous()
                self._over(self._everyone).broadcast(flat, source, tag)
                if flat is not values:
                    values.copy_(flat)
        return values

    def from_shard(self, values: Tensor, unit: str, source: int) -> Tensor:
        """values, contiguous <- those of shard rank `source`, in place."""
        with self._naming("broadcast", unit) as tag:
            self._over(self.shard).broadcast(values, source, tag)
        return values

    @property
    def cuts_unequally(self) -> bool:
        """Whether the collectives between shard ranks take shards of different sizes."""
        return self.shard.size == 1 or isinstance(self._over(self.shard), RowCollectives)

    def _over(self, axis: Axis) -> Any:
        return self._of_group[id(axis.group)]

    def _break_off(self) -> None:
        for each in self._of_group.values():
            each.break_off()

"""This process among those of its run: who it is, and the three words that ranks exchange. No sharding.

torchrun's environment says how many ranks there are; without it there is one, and torch.distributed stays unused.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """Rank and world size, on this machine and in all."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def leader(self) -> bool:
        """Whether this rank prints and writes the report."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def mean(self, value: float) -> float:
        """The mean over ranks, the same on each."""
        if self.world_size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.world_size

    def most(self, value: int) -> int:
        """The largest over ranks, the same on each."""
        if self.world_size == 1:
            return value
        largest = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest.item())

    def agree(self, text: str) -> str:
        """The leader's text, on every rank: clocks differ, and with them the names of run folders."""
        if self.world_size == 1:
            return text
        box = [text]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, text: str | None) -> Sequence[str | None]:
        """Every rank's text, in order, on every rank."""
        if self.world_size == 1:
            return [text]
        box: list[str | None] = [None] * self.world_size
        dist.all_gather_object(box, text)
        return box


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process as a rank. Starts the process group that torchrun announces; it lasts until the process ends.

    torchrun's rendezvous is for one group: a second one, for the next job of a sweep, would meet the first one's keys.
    """
    if dist.is_available() and dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        world = dist.get_world_size()
        yield Ranks(dist.get_rank(), world, local, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    ranks = Ranks(
        int(os.environ["RANK"]),
        world,
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", world)),
    )
    if torch.cuda.is_available():
        torch.cuda.set_device(ranks.device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    atexit.register(dist.destroy_process_group)
    yield ranks

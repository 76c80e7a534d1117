"""This process among those of its run: who it is, and the three words that ranks exchange. No sharding.

torchrun's environment says how many ranks there are; without it there is one, and torch.distributed stays unused.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zero_core.device import backend_of


@dataclass(frozen=True)
class Ranks:
    """Rank and world size, on this machine and in all."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device_type: str = field(default_factory=lambda: device_type(None))

    @property
    def leader(self) -> bool:
        """Whether this rank prints and writes the report."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, self.local_rank)

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


def device_type(asked: str | None) -> str:
    """The type of device that a run computes on: `asked`, where torch sees one; else torch's accelerator, or the CPU.

    Two kinds of accelerator are used only where they are asked for: one without streams (MPS), and one that simulates,
    as its module says (`simulated`).
    """
    if asked == "cpu" or (asked and sees(asked)):
        return asked
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = torch.get_device_module(found) if found is not None else None
    if found is None or not hasattr(module, "Stream") or getattr(module, "simulated", False):
        return "cpu"
    return found.type


def sees(name: str) -> bool:
    """Whether torch sees a device of this type on this machine."""
    try:
        return bool(torch.get_device_module(name).is_available())
    except RuntimeError:  # torch does not know the type
        return False


@contextmanager
def joined(asked: str | None = None) -> Iterator[Ranks]:
    """This process as a rank. Starts the process group that torchrun announces; it lasts until the process ends.

    asked: hardware.device, see `device_type`.
    torchrun's rendezvous is for one group: a second one, for the next job of a sweep, would meet the first one's keys.
    """
    kind = device_type(asked)
    if dist.is_available() and dist.is_initialized():
        local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
        world = dist.get_world_size()
        yield Ranks(dist.get_rank(), world, local, int(os.environ.get("LOCAL_WORLD_SIZE", world)), kind)
        return
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks(device_type=kind)
        return
    ranks = Ranks(
        int(os.environ["RANK"]),
        world,
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        kind,
    )
    if kind != "cpu":
        torch.get_device_module(kind).set_device(ranks.device)
    dist.init_process_group(backend_of(kind))
    atexit.register(dist.destroy_process_group)
    yield ranks

"""Knows which rank this process is, exchanges small values with the others, and compares machines. Owns no sharding.

torchrun's environment says how many ranks there are. Without it there is one, and torch.distributed is not used.

[Note: one store for several starts]
With --master-addr, and by default with c10d, ranks meet in the store of the first torchrun, which outlives them. The
addresses of ranks that have ended are still in it, and a rank that takes one for that of a living rank waits in vain
(pytorch#135712). The number of the start is no help: each torchrun counts its own. So rank 0 writes a new name into
the store, every other rank answers under that name by a name of its own, and rank 0 writes down whose answers it has
seen. A rank that finds its own there goes on under that name, and one that does not looks for another name of rank 0.
Where a rank has ended since it answered, the others wait for it until their time-out, and their next start meets under
a new name.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from zero_core.device import backend_of
from zero_core.errors import reached
from zero_train.errors import ConfigError, RunError

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of ranks, on this machine and in total."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    device_type: str = field(default_factory=lambda: device_type(None))

    @property
    def leader(self) -> bool:
        """Whether this is the rank that prints and writes the report."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, self.local_rank)

    def mean(self, value: float) -> float:
        """Returns the mean over all ranks, the same bits on each. Collective."""
        return self.sum(value) / self.world_size

    def sum(self, value: float) -> float:
        """Returns the sum over all ranks, the same bits on each. Collective."""
        return sum(self.gather(value))

    def most(self, value: int) -> int:
        """Returns the largest value over all ranks. Collective."""
        return max(self.gather(value))

    def agree(self, text: str) -> str:
        """Returns the first rank's text on every rank: clocks, and so the names of run folders, differ. Collective."""
        return self.gather(text)[0]

    def gather(self, value: Value) -> list[Value]:
        """Returns every rank's value in the order of ranks, on every rank. The values are pickled. Collective."""
        box = [value] * self.world_size
        if self.world_size > 1:
            with reached(self.rank, self.world_size):
                dist.all_gather_object(box, value)
        return box


def device_type(asked: str | None) -> str:
    """Returns the type of device that a run computes on: `asked` if torch sees one, else torch's accelerator or cpu.

    Two kinds of accelerator are used only on request: those without streams (MPS), and those whose module says that
    they are simulated (`simulated`).
    """
    module = module_of(asked) if asked else None
    if asked and module and module.is_available():
        return asked
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = module_of(found.type) if found else None
    usable = hasattr(module, "Stream") and not getattr(module, "simulated", False)
    return found.type if found and usable else "cpu"


def module_of(name: str) -> Any | None:
    """Returns torch's module of a type of device, such as torch.cuda, or None if torch does not know the type."""
    try:
        return torch.get_device_module(name)
    except RuntimeError:
        return None


def joined(asked: str | None, timeout: float) -> Ranks:
    """Joins the process group that torchrun announces, if any, and returns this process as a rank.

    `asked` is hardware.device, see `device_type`; `timeout` is run.timeout, in seconds. The group lasts until the
    process ends: torchrun's rendezvous serves one group only, so that the next job of a sweep has to use the same one.

    Raises:
        RunError: the others have not come in time.
    """
    kind = device_type(asked)
    running = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size() if running else int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Ranks(device_type=kind)
    rank = dist.get_rank() if running else int(os.environ["RANK"])
    local_rank = int(os.environ.get("LOCAL_RANK", rank if running else 0))
    ranks = Ranks(rank, world, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world)), kind)
    if not running:
        if kind != "cpu":
            torch.get_device_module(kind).set_device(ranks.device)
        try:
            store = meeting_store(rank, world, timeout)
            where: dict[str, Any] = {} if store is None else {"store": store, "rank": rank, "world_size": world}
            dist.init_process_group(backend_of(kind), timeout=timedelta(seconds=timeout), **where)
        except RuntimeError as error:  # of the store, or of gloo
            raise RunError(
                f"the run stopped: rank {rank} of {world} did not reach the others: {str(error).rstrip('. ')}. Start "
                f"all ranks within run.timeout={timeout:g} seconds, or raise it"
            ) from error
        atexit.register(dist.destroy_process_group)
    return ranks


def same_text(ranks: Ranks, corpus: Any, named: str) -> None:
    """Raises ConfigError on every rank if one has another text than rank 0 under `named`. Collective."""
    if ranks.world_size == 1:
        return
    hosts, digests = zip(*ranks.gather((socket.gethostname(), corpus.digest)), strict=True)
    for rank, found in enumerate(digests):
        if found != digests[0]:
            raise ConfigError(
                f"{named} is another text on rank {rank} (on {hosts[rank]}) than on rank 0 (on {hosts[0]}): {found}, "
                f"and rank 0 has {digests[0]}; copy rank 0's to every machine, or keep it in a folder that all share"
            )


def same_folder(ranks: Ranks, folder: Path) -> None:
    """Raises ConfigError unless `folder`, which the first rank has made, is the same one on every machine. Collective.

    Each rank makes a file with a new name: where nobody has asked for a name, a network filesystem asks the server.
    """
    mark = ranks.agree(f".seen-{uuid.uuid4().hex}")
    files = [folder / f"{mark}-{rank}" for rank in range(ranks.world_size)]
    own, made = files[ranks.rank], not folder.exists()
    with suppress(OSError):  # the first rank will not see it
        folder.mkdir(parents=True, exist_ok=True)
        own.touch()
    hosts = ranks.gather(socket.gethostname())
    unseen = ranks.gather([rank for rank, file in enumerate(files) if not file.exists()] if ranks.leader else [])[0]
    with suppress(OSError):
        own.unlink()
        if made:
            folder.rmdir()
    if unseen:
        raise ConfigError(
            f"run.dir={folder} is not one folder for all ranks: what rank {unseen[0]} on {hosts[unseen[0]]} writes "
            f"there is not there on {hosts[0]}, so no checkpoint would be whole; name a folder that all machines share "
            "with run.dir=…, and with offload.nvme_paths=[…] one on each machine's own disk"
        )


def together(ranks: Ranks, function: Callable[[], Value]) -> Value:
    """Calls `function` on every rank. If any rank raises ConfigError, all raise the first one's. Collective."""
    result, reason = None, None
    try:
        result = function()
    except ConfigError as error:
        reason = str(error)
    if reasons := list(filter(None, ranks.gather(reason))):
        raise ConfigError(reasons[0])
    return cast(Value, result)


_LEADER = "zero_train/leader"
_PAUSE = 0.05  # seconds between two looks for another name


def meeting_store(rank: int, world_size: int, timeout: float) -> Any | None:
    """Returns the store in which only ranks of this start write, or None where torch makes one. Collective.

    Raises:
        torch.distributed.DistError: the others have not come within `timeout` seconds.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
        return None
    address, port, limit = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout)
    store = dist.TCPStore(address, port, is_master=False, timeout=limit, wait_for_workers=False)
    name = _called(store, world_size) if rank == 0 else _followed(store, rank, timeout)
    return dist.PrefixStore(name, store)


def _called(store: Any, world_size: int) -> str:
    name = f"zero_train/{uuid.uuid4().hex}"
    store.set(_LEADER, name)
    answers = [store.get(f"{name}/{rank}").decode() for rank in range(1, world_size)]  # each waits for its rank
    store.set(f"{name}/met", json.dumps(answers))
    return name


def _followed(store: Any, rank: int, timeout: float) -> str:
    mine, followed, deadline = uuid.uuid4().hex, "", time.monotonic() + timeout
    while time.monotonic() < deadline:
        name = store.get(_LEADER).decode()
        if name != followed:
            store.set(f"{name}/{rank}", mine)
            followed = name
        if store.check([f"{name}/met"]) and mine in json.loads(store.get(f"{name}/met")):
            return name
        time.sleep(_PAUSE)
    raise dist.DistStoreError(f"rank 0 has not started within {timeout:g} s")

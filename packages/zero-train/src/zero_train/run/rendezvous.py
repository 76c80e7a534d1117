"""Finds the store in which the ranks of one start meet, if torchrun has started ranks before.

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

import json
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_LEADER = "zero_train/leader"
_PAUSE = 0.05  # seconds between two looks for another name


def place(rank: int, world_size: int, timeout: float) -> Any | None:
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

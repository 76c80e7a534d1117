"""Which cores this rank's update, launches and I/O take on the host of a GPU. On the CPU: nothing is changed.

Owns the binding of this process and its end; which cores they are is decided in zero_optim_cpu.cores.
NOT YET RUN on a GPU: the tests claim cores for a device that is only named.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from zero_train import checks
from zero_train.ranks import Ranks
from zero_train.schema import Config


@contextmanager
def claimed(config: Config, ranks: Ranks) -> Iterator[Any | None]:
    """Binds this thread, and so every thread that it starts, to the cores that the update leaves free. Collective.

    Yields the zero_optim_cpu.Cores; None where nothing is bound: compute on the CPU, no offload, or threads that the
    configuration counts itself (optim.threads). To be entered before memory is filled, which is then taken beside the
    GPU. torch computes on the launching cores only, unless run.threads says otherwise. Undone at the end.
    """
    on_gpu = ranks.device.type != "cpu" and importlib.util.find_spec("zero_optim_cpu") is not None
    if not on_gpu or config.offload.kind == "none" or config.optim.threads is not None:
        yield None
        return
    cores = checks.sibling("zero_optim_cpu").cores
    mine = json.dumps(asdict(cores.seat_of(ranks.device)))
    first = ranks.rank - ranks.local_rank
    said = ranks.gather(mine)[first : first + ranks.local_world_size]
    seats = [cores.Seat(seat["node"], tuple(seat["allowed"])) for seat in map(json.loads, filter(None, said))]
    chosen = cores.beside_gpus(seats, ranks.local_rank)
    affinity, threads = os.sched_getaffinity(0), torch.get_num_threads()
    try:
        os.sched_setaffinity(0, chosen.rest)
        if config.run.threads is None:
            torch.set_num_threads(chosen.rest_cores)
        yield chosen
    finally:
        os.sched_setaffinity(0, affinity)
        torch.set_num_threads(threads)

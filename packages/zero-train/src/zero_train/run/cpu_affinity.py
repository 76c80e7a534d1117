"""Binds this rank to the cores of its GPU's NUMA node that the update leaves free. Changes nothing for CPU training.

Owns the binding and its end. zero_optim_cpu.cores decides which cores they are.
The tests name a device without having one. It has run beside one H200.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zero_train.run.ranks import Ranks
from zero_train.schema import Config
from zero_train.settings import extras


@contextmanager
def claimed(config: Config, ranks: Ranks) -> Iterator[Any | None]:
    """Binds this thread, and every thread that it starts, to the cores that the update leaves free. Collective.

    Yields the zero_optim_cpu.Cores, or None if nothing is bound: the run computes on the CPU, offloads nothing, or sets
    optim.threads. torch computes on the launching cores only, unless run.threads is set. Enter it before memory is
    filled, so that the memory is allocated on the GPU's NUMA node. The binding is undone at the end.
    """
    on_gpu = ranks.device.type != "cpu" and importlib.util.find_spec("zero_optim_cpu") is not None
    if not on_gpu or config.offload.kind == "none" or config.optim.threads is not None:
        yield None
        return
    cores = extras.loaded("zero_optim_cpu").cores
    first = ranks.rank - ranks.local_rank
    seats = ranks.gather(cores.seat_of(ranks.device))[first : first + ranks.local_world_size]
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

"""Simulates an accelerator for PyTorch, and finds races between streams. The import registers the device "sim"."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import annotate, device_module, host_threads  # noqa: F401 (device_module registers itself)
from .annotate import Meeting, Task, begin, host_access
from .build import ZeroSimError, native
from .counting import Counts, Wait, counts
from .races import Party, Race, RaceError, detect, take_races

__all__ = [
    "Counts",
    "Meeting",
    "Party",
    "Race",
    "RaceError",
    "Task",
    "Wait",
    "ZeroSimError",
    "begin",
    "configure",
    "counts",
    "detect",
    "host_access",
    "take_races",
]


def _communicator(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a communicator: gloo moves the bytes, in the order of the devices' streams."""
    return native.SimCCL(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)


def configure(
    latency_us: int | None = None,
    jitter_us: int | None = None,
    seed: int | None = None,
    strict: bool | None = None,
    races: bool | None = None,
) -> None:
    """Changes how the devices behave from now on. Options that are left out stay as they are.

    latency_us: the least time between queueing a kernel or copy and its start.
    jitter_us: at most this much more, drawn from `seed` for each stream.
    strict: memory is overwritten when it is freed, in its stream's order, which the detector takes as a write.
    races: look for races.
    """
    options = native.options()
    given = {"latency_us": latency_us, "jitter_us": jitter_us, "seed": seed, "strict": strict, "races": races}
    for name, value in given.items():
        if value is not None:
            setattr(options, name, value)
    if options.races:
        host_threads.install()
    native.set_options(options)


def _folders(package: str) -> list[str]:
    found = importlib.util.find_spec(package)
    return list(found.submodule_search_locations or []) if found else []


# Frames that reports leave out; pluggy calls pytest's hooks, so that no frame above its own belongs to the test.
native.skip_frames_of(
    [str(Path(torch.__file__).parent), str(Path(__file__).parent), contextlib.__file__, threading.__file__, "<frozen"]
    + _folders("_pytest"),
    _folders("pluggy"),
)
if dist.is_available() and "simccl" not in dist.Backend.backend_list:
    dist.Backend.register_backend("simccl", _communicator, devices=["sim"])  # for "cpu:gloo,sim:simccl"
annotate.follow_reads()
if native.options().races:
    host_threads.install()
atexit.register(native.stop)

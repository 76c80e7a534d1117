"""Simulates an accelerator for PyTorch, and finds races between streams. The import registers the device "sim"."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import threading
from pathlib import Path

import torch

from . import annotate, collectives, device_module, host_threads  # noqa: F401 (device_module registers itself)
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


def _start() -> None:
    """Tells the runtime which frames reports leave out, starts the followers, and stops the runtime at exit."""
    tools = [contextlib.__file__, threading.__file__, "<frozen", *_folders("_pytest")]
    native.skip_frames_of(
        [str(Path(torch.__file__).parent), str(Path(__file__).parent), *tools],
        _folders("pluggy"),  # which calls pytest's hooks: no frame above it belongs to the test
    )
    collectives.register()
    annotate.follow_reads()
    if native.options().races:
        host_threads.install()
    atexit.register(native.stop)


_start()

"""Reads the counts of launches, copies and bytes that the host queued, and the places where it waited for a device."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, fields
from typing import NamedTuple

from .build import native


class Wait(NamedTuple):
    """A place where the host waited for a device, or asked whether it would have to."""

    what: str  # "event synchronize", "copy to the host", "aten::nonzero"
    place: str  # "run/train.py:12 in step < run/train.py:40 in main", the innermost frame first
    thread: str  # its name; empty for a thread that torch made, such as autograd's


@dataclass(frozen=True)
class Counts:
    """Counts of all devices. `after - before` counts the time in between.

    launches: operations that were queued and are no copies. A GPU may take several kernels for one of them.
    copies, bytes: by kind, such as "copy to the device" and "copy to the device, pageable".
    waits: how often each place waited. Copies that block are among them.
    unlike_cuda: operations without a Meta kernel, for which the host waits here and would not on CUDA.
    """

    launches: int
    copies: Counter[str]
    bytes: Counter[str]
    waits: Counter[Wait]
    unlike_cuda: int

    def __sub__(self, before: Counts) -> Counts:
        return Counts(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))


def counts() -> Counts:
    """Returns the counts of all devices since the process began."""
    queued, unlike_cuda, copies, waits = native.counts()
    started = {t.native_id: t.name for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
    seen: Counter[Wait] = Counter()
    for what, place, thread, times in waits:
        seen[Wait(what, place, started.get(thread, ""))] += times
    named = {(f"{what}, pageable" if pageable else what): found for (what, pageable), found in copies.items()}
    return Counts(
        queued - sum(times for times, _ in named.values()),
        Counter({what: times for what, (times, _) in named.items()}),
        Counter({what: nbytes for what, (_, nbytes) in named.items()}),
        seen,
        unlike_cuda,
    )

"""Reads the races that the detector has found. Owns the records, their text, and the error that carries them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .build import native


@dataclass(frozen=True)
class Party:
    """One of the two accesses of a race."""

    actor: str  # "stream 3 of sim:0", "default stream of sim:0", "host thread MainThread", "task 'read'"
    what: str  # "aten::add", "copy to host", "memory given out again"
    site: str  # "run/train.py:12 in step < run/train.py:40 in main", the innermost frame first


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes that nothing orders. At least one is a write."""

    kind: str  # "read after write", "write after read", "write after write"
    begin: int  # address of the first byte of the conflict
    end: int  # address past the last
    memory: str  # what kind of memory it is, and where it was allocated
    now: Party
    before: Party
    missing: str  # the edge that would order them, as a sentence; `now` and `before` in its code are their streams
    others: int = 0  # more operations at `now.site` that lack the same edge on the same memory

    def __str__(self) -> str:
        more = f", and {self.others} more of this line" if self.others else ""

        def told(party: Party) -> str:
            return f"{party.actor}: {party.what}{more if party is self.now else ''}\n             at {party.site}"

        return (
            f"Race: {self.kind}, {self.end - self.begin:,} bytes at 0x{self.begin:x}\n"
            f"    memory   {self.memory}\n"
            f"    now      {told(self.now)}\n"
            f"    before   {told(self.before)}\n"
            f"    missing  {self.missing}"
        )


class RaceError(RuntimeError):
    """Says that races occurred. `races` holds them, and the message is their reports."""

    def __init__(self, races: list[Race]) -> None:
        self.races = races
        super().__init__(report(races))


def report(races: list[Race]) -> str:
    """Returns the text of several races, headed by their number."""
    head = "1 race was found." if len(races) == 1 else f"{len(races)} races were found."
    return "\n\n".join([head, *map(str, races)])


_kept: list[Race] = []  # found before a `detect()` that has ended since


def take_races() -> list[Race]:
    """Returns the races found since the last call, one for each pair of places in the program."""
    races, _kept[:] = list(_kept), []
    for found in native.take_races():
        now, before = (Party(p.actor, p.what, p.site) for p in (found.now, found.before))
        races.append(Race(found.kind, found.begin, found.end, found.memory, now, before, found.missing, found.others))
    return races


def synchronize() -> None:
    """Waits for all streams of all devices."""
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)


@contextlib.contextmanager
def detecting() -> Iterator[None]:
    """Looks for races inside, also where they are not looked for outside."""
    from . import host_threads

    host_threads.install()
    options = native.options()
    was, options.races = options.races, True
    if not was:
        native.set_options(options)
    try:
        yield
    finally:
        if not was:
            options = native.options()
            options.races = False
            native.set_options(options)


@contextlib.contextmanager
def detect() -> Iterator[None]:
    """Raises RaceError at the end if a race occurred inside. Waits for the devices first.

    Races found earlier stay for the next `take_races()`. So do those found inside if the block raises something else.
    """
    with detecting():
        earlier = take_races()
        try:
            yield
            synchronize()
        except BaseException:
            _kept.extend(earlier)
            raise
        races = take_races()
        _kept.extend(earlier)
    if races:
        raise RaceError(races)

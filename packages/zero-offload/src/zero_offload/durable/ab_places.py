"""Keeps two places on disk for a durable value: one has the last step on disk, the other takes the next.

Not here: when a generation is complete (in generations.py).

[Note: a copy]
A checkpoint in the background copies the values of step N while training goes on. Step N+1 writes to the other places,
and step N+2 would write over N's. `Pins` holds these places back: each is free as soon as it has been read, in the
order in which updates come, so an update waits only where the disk is slower than two steps. No third place is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from torch import Tensor

from ..layout.tile import Tile
from ..memory.transfers import Stored, Transfer


def states_of(tile: Tile) -> str:
    """The name of the value that is a tile's record."""
    return f"states/{tile.unit}/{tile.index}"


def parameters_of(tile: Tile) -> str:
    """The name of the value that is a tile's parameters."""
    return f"parameters/{tile.unit}/{tile.index}"


class TwoPlaces:
    """A value of `nbytes` in two places, read and written as a `Stored`; each write is of the whole value.

    source: the memory that has the value, if it is not read and written here but copied at each commit.
    """

    def __init__(self, places: tuple[Stored, Stored], nbytes: int, pins: Pins) -> None:
        self.places, self.nbytes, self._pins = places, nbytes, pins
        self.source: Callable[[], Tensor] | None = None
        self.now = 0  # the place that was written last
        self.committed: int | None = None  # the place that the last generation has
        self.changed = False  # `source` differs from the value on disk

    def read(self, buffer: Tensor, what: str) -> Transfer:
        """As `Stored.read`, of the last values that were written."""
        return self.places[self.now].read(buffer, what)

    def write(self, buffer: Tensor, what: str) -> Transfer:
        """As `Stored.write`, to the place that the last generation does not use. Waits while a copy needs it."""
        if self.now == self.committed or self._pins.place(self) == self.now:
            self.now = 1 - self.now
        if self.now in (self.committed, self._pins.place(self)):
            self._pins.wait(self)
            if self.now == self.committed:
                self.now = 1 - self.now
        return self.places[self.now].write(buffer, what)

    def drain(self) -> None:
        """As `Stored.drain`."""
        self.places[self.now].drain()

    def writing(self) -> bool:
        """As `Stored.writing`."""
        return self.places[self.now].writing()

    def commit(self) -> None:
        """The values that were written last belong to the last generation now."""
        self.committed = self.now

    def described(self) -> list[int]:
        """The manifest's entry: bytes, the offsets of both places, and the place that was written last."""
        first, second = (each.extent.offset_bytes for each in self.places)
        return [self.nbytes, first, second, self.now]


class Pins:
    """Places that a copy still has to read. Called from any thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._places: dict[TwoPlaces, int] = {}

    def put(self, values: Iterable[TwoPlaces]) -> None:
        """Pins the current place of each of these values."""
        with self._condition:
            assert not self._places, "two copies at a time"
            self._places = {value: value.now for value in values}

    def place(self, value: TwoPlaces) -> int | None:
        """The pinned place of the value; None: it is not pinned."""
        with self._condition:
            return self._places.get(value)

    def give_up(self, values: Iterable[TwoPlaces] | None = None) -> None:
        """Unpins these values, or all: they are copied, or never will be."""
        with self._condition:
            for value in list(self._places) if values is None else values:
                self._places.pop(value, None)
            self._condition.notify_all()

    def wait(self, value: TwoPlaces) -> None:
        """Returns when the value is not pinned."""
        with self._condition:
            self._condition.wait_for(lambda: value not in self._places)

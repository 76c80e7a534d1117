"""An uncut tile's update on a discrete device: its values go there, are updated, and come back.

Owns the copies of one tile and the memory on the device between them. The arithmetic is the step's, as ever: it finds
the tile's tensors on the device, and runs the optimizer's class there.

[Note: a visit]
    update thread   |       launches               | waits for the last copy
    update lane     | H2D of t | step of t | D2H of t |
The memory is allocated and freed with the lane as the current stream, so torch's allocator gives it to the lane alone,
and the next tile gets it again. The tile's host memory is not used for anything else until the visit ends, as in an
update on the CPU. The lane and the compute stream do not wait for each other: the tile's unit is not in use before its
update is over, and the pipeline has waited for options that are tensors on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ..streams import Lane, Mark, Streams
from ..tiles.tile import View
from ..transfers import InFlight

__all__ = ["Visits"]

LANE: Lane = "update"


class Visits:
    """Of one store's uncut tiles, one after another, on the update thread."""

    def __init__(self, streams: Streams, in_flight: InFlight) -> None:
        self._streams, self._in_flight = streams, in_flight

    @contextmanager
    def visit(self, tile: View) -> Iterator[View]:
        """The tile as the step gets it: on the device if it is uncut, whose changed values are back afterwards."""
        if tile.uncut is None:
            yield tile
            return
        with self._streams.inside(LANE):
            states = {name: self._up(values) for name, values in tile.states.items()}
            there = View(states, self._up(tile.parameter), self._up(tile.gradient), tile.uncut)
            yield there
            for name, values in tile.states.items():
                self._down(values, there.states[name])
            self._down(tile.parameter, there.parameter).wait()

    def _up(self, values: Tensor) -> Tensor:
        there = self._streams.empty(values.numel(), values.dtype)
        self._streams.copy(LANE, there, values)
        self._in_flight.count("swap_in", values.nbytes)
        return there

    def _down(self, values: Tensor, there: Tensor) -> Mark:
        self._in_flight.count("swap_out", values.nbytes)
        return self._streams.copy(LANE, values, there)

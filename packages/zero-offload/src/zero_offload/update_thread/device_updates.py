"""Updates uncut tiles on a discrete device: copies their values there, updates them, copies them back.

Owns the copies of these tiles, several at a time, and the memory on the device between them. Not here: the arithmetic.
The step finds a tile's tensors on the device, and runs the optimizer's class there.

[Note: visits]
    lane update_in    | H2D of t | H2D of t+1 | H2D of t+2 |
    lane update       |          | step of t  | step of t+1 | step of t+2 |
    lane update_out   |                       | D2H of t    | D2H of t+1  | D2H of t+2
    update thread     launches t, t+1, t+2, waits for the last copy of t, launches t+3
A tile's memory is allocated with update_in as the current stream, and freed after the host has waited for its last
copy. By then no lane uses it, so torch's allocator gives it to a later tile. Only the update lane uses memory that the
step allocates. A tile's host memory is not used for anything else until its visit ends, as in an update on the CPU. No
lane waits for the compute stream, and it waits for none: the tile's unit is not in use before its update is over, and
the pipeline has waited for options that are tensors on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..memory.transfers import InFlight
from ..protocols import Started, TileView
from ..streams import Lane, Mark, Streams

UP: Lane = "update_in"
UPDATE: Lane = "update"
DOWN: Lane = "update_out"


@dataclass(frozen=True)
class _Visit:
    """As Started. `there`: the tile on the device, whose memory is freed after the last copy."""

    there: TileView
    back: Mark

    def done(self) -> bool:
        return self.back.done()

    def wait(self) -> None:
        self.back.wait()


class Visits:
    """The visits of one store's uncut tiles. Only the update thread calls it."""

    def __init__(self, streams: Streams, in_flight: InFlight) -> None:
        self._streams, self._in_flight = streams, in_flight

    def start(self, tile: TileView, update: Callable[[TileView], None]) -> Started:
        """Queues the tile's copies to the device, calls `update` with it there, and queues the copies back.

        On an error, of `update` for example, raises it after all queued work of the lanes is done.
        """
        try:
            with self._streams.inside(UP):
                states = {name: self._up(values) for name, values in tile.states.items()}
                there = TileView(states, self._up(tile.parameter), self._up(tile.gradient), tile.uncut)
                arrived = self._streams.mark()
            with self._streams.inside(UPDATE):
                self._streams.follow(arrived)
                update(there)
                over = self._streams.mark()
            with self._streams.inside(DOWN):
                self._streams.follow(over)
                for name, values in tile.states.items():
                    self._down(values, there.states[name])
                return _Visit(there, self._down(tile.parameter, there.parameter))
        except BaseException:
            self._streams.drain()
            raise

    def _up(self, values: Tensor) -> Tensor:
        there = self._streams.empty(values.numel(), values.dtype)
        self._streams.copy(UP, there, values)
        self._in_flight.count("swap_in", values.nbytes)
        return there

    def _down(self, values: Tensor, there: Tensor) -> Mark:
        self._in_flight.count("swap_out", values.nbytes)
        return self._streams.copy(DOWN, values, there)

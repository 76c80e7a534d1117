"""Units on their way to the compute device: begun as soon as their update is done and their bytes are in memory.

Owns the arrivals that have not begun. The memory they go to is the caller's, where they come from is `parameters`'.

[Note: who begins a copy]
The training thread asks for a unit ahead of its use. What it asks for may still be updated, or read from nvme; the copy
is then begun by whoever sees it ready first: the update thread when the unit is done, the training thread at its next
call, at the latest in wait(). Only there the training thread waits, and the time is exposed.
"""

from __future__ import annotations

from torch import Tensor

from ..monitor import Monitor
from ..streams import Mark, Streams
from ..tiles.device_tier import DeviceTier
from ..tiles.footprint import StorePlan
from ..tiles.parameters import ParameterStore

__all__ = ["Arrival", "Uploads"]


class Arrival:
    """zero-core's Arrival: unit `unit` on its way into `out`."""

    __slots__ = ("_uploads", "after", "copied", "out", "unit")

    def __init__(self, uploads: Uploads, unit: int, out: Tensor, after: Mark) -> None:
        self._uploads, self.unit, self.out, self.after = uploads, unit, out, after
        self.copied: Mark | None = None

    def wait(self) -> None:
        self._uploads.finish(self)

    def drop(self) -> None:
        self._uploads.drop(self)


class Uploads:
    """Copies of whole shards, one arrival each. `nbytes`: of those that come from the host."""

    def __init__(
        self, streams: Streams, parameters: ParameterStore, device: DeviceTier, plan: StorePlan, monitor: Monitor
    ) -> None:
        self._streams, self._parameters, self._device = streams, parameters, device
        self._plan, self._monitor = plan, monitor
        self._waiting: dict[Arrival, None] = {}
        self.nbytes = 0

    def begin(self, i: int, out: Tensor) -> Arrival:
        """Unit i into `out` (shard_numel,) on the compute device, after what the caller's stream has queued."""
        arrival = Arrival(self, i, out, self._streams.mark())
        with self._monitor.condition:
            self._waiting[arrival] = None
            if not self._monitor.updates[i]:
                self._parameters.prefetch(i)
            self.poll()
        return arrival

    @property
    def waiting(self) -> list[int]:
        """The units of arrivals that have not begun."""
        return [arrival.unit for arrival in self._waiting]

    def poll(self) -> None:
        """Begin what can begin without waiting. Any thread."""
        if not self._waiting:
            return
        with self._monitor.condition:
            for arrival in list(self._waiting):
                if not self._monitor.updates[arrival.unit] and self._parameters.arrived(arrival.unit):
                    self._copy(arrival, self._parameters.acquire(arrival.unit))
                    self._parameters.release(arrival.unit)

    def finish(self, arrival: Arrival) -> None:
        """The caller's stream goes on with the unit in its place."""
        if arrival.copied is None:
            i = arrival.unit
            self._monitor.wait_until(lambda: not self._monitor.updates[i], self._plan.units[i].spec.name)
            source = self._parameters.acquire(i)
            try:
                with self._monitor.condition:
                    if arrival.copied is None:
                        self._copy(arrival, source)
            finally:
                self._parameters.release(i)
        assert arrival.copied is not None
        self._streams.follow(arrival.copied)

    def drop(self, arrival: Arrival) -> None:
        """What was asked for is not wanted: it does not begin, or ends before the caller's stream goes on."""
        with self._monitor.condition:
            self._waiting.pop(arrival, None)
        if arrival.copied is not None:
            self._streams.follow(arrival.copied)

    def _copy(self, arrival: Arrival, source: Tensor) -> None:
        """The caller has the condition."""
        self._waiting.pop(arrival, None)
        copied = self._device.copy_into(arrival.unit, arrival.out, arrival.after)
        if copied is None:
            copied = self._streams.copy("swap_in", arrival.out, source, (arrival.after,))
            self._parameters.leaving(arrival.unit, copied)
            self.nbytes += source.nbytes
        arrival.copied = copied

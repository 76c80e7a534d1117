"""Copies units to the compute device, as soon as their update is done and their bytes are in memory.

Owns the uploads that have not begun. Not here: their source (in parameters.py), their destination (the caller's).

[Note: who begins a copy]
The training thread asks for a unit ahead of its use. The unit may still be updated, or read from nvme. Then the thread
that sees it ready first begins the copy: the update thread when the unit is done, the training thread at its next call,
at the latest in wait(). Only there the training thread waits, and the time is exposed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..streams import Mark, Streams
from ..tiles.parameters import ParameterStore
from ..tiles.store_context import Shared


class Upload:
    """The copy of unit `unit` into `out`. A zero-core `Arrival`."""

    __slots__ = ("_uploads", "after", "copied", "out", "unit")

    def __init__(self, uploads: Uploads, unit: int, out: Tensor, after: Mark) -> None:
        self._uploads, self.unit, self.out, self.after = uploads, unit, out, after
        self.copied: Mark | None = None

    def wait(self) -> None:
        self._uploads.finish(self)

    def drop(self) -> None:
        self._uploads.drop(self)


class Uploads:
    """Copies of whole shards, one upload each."""

    def __init__(
        self, shared: Shared, streams: Streams, host: ParameterStore, there: Callable[[int, Tensor, Mark], Mark | None]
    ) -> None:
        """there: begins the copy of a unit whose parameters are on the device already, else returns None."""
        self._streams, self._host, self._on_device = streams, host, there
        self._plan, self._monitor, self._in_flight = shared.plan, shared.monitor, shared.in_flight
        self._waiting: dict[Upload, None] = {}

    def begin(self, i: int, out: Tensor) -> Upload:
        """Asks for unit i in `out` (shard_numel,) on the compute device, after the work on the caller's stream."""
        upload = Upload(self, i, out, self._streams.mark())
        with self._monitor.condition:
            self._waiting[upload] = None
            if not self._monitor.updates[i]:
                self._host.prefetch(i)
            self.poll()
        return upload

    @property
    def waiting(self) -> list[int]:
        """The units of uploads that have not begun."""
        return [upload.unit for upload in self._waiting]

    def poll(self) -> None:
        """Begins all copies that can begin without waiting. Called from any thread."""
        if not self._waiting:
            return
        with self._monitor.condition:
            for upload in list(self._waiting):
                if not self._monitor.updates[upload.unit] and self._host.arrived(upload.unit):
                    self._copy(upload, self._host.acquire(upload.unit))
                    self._host.release(upload.unit)

    def finish(self, upload: Upload) -> None:
        """Makes the caller's stream wait for the unit's copy, which it begins if need be."""
        if upload.copied is None:
            i = upload.unit
            self._monitor.wait_until(lambda: not self._monitor.updates[i], self._plan.units[i].spec.name)
            source = self._host.acquire(i)
            try:
                with self._monitor.condition:
                    if upload.copied is None:
                        self._copy(upload, source)
            finally:
                self._host.release(i)
        assert upload.copied is not None
        self._streams.follow(upload.copied)

    def drop(self, upload: Upload) -> None:
        """Cancels an upload that has not begun; makes the caller's stream wait for one that has."""
        with self._monitor.condition:
            self._waiting.pop(upload, None)
        if upload.copied is not None:
            self._streams.follow(upload.copied)

    def _copy(self, upload: Upload, source: Tensor) -> None:
        """Begins the copy. The caller holds the condition."""
        self._waiting.pop(upload, None)
        copied = self._on_device(upload.unit, upload.out, upload.after)
        if copied is None:
            copied = self._streams.copy("swap_in", upload.out, source, (upload.after,))
            self._host.leaving(upload.unit, copied)
            self._in_flight.count("swap_in", source.nbytes)
        upload.copied = copied

"""Copies units to a discrete device, gradients from it to the host, and tiles there and back for their update.

Owns the uploads that have not begun, the landing buffers on the device, the staging slots on the host, and the memory
of tiles that visit the device. Not here: the source of units (in tiles/parameters.py), their destination (the
caller's), where gradients are kept, their form and their sums (in tiles/gradients.py), the thread itself (in
monitor.py), the arithmetic: the step finds a tile's tensors on the device, and runs the optimizer's class there.

[Note: who begins a copy]
The training thread asks for a unit ahead of its use. The unit may still be updated, or read from nvme. Then the thread
that sees it ready first begins the copy: the update thread when the unit is done, the training thread at its next call,
at the latest in wait(). Only there the training thread waits, and the time is exposed.

[Note: the copy to the host]
    compute stream   backward of i writes landing 0 | backward of i-1 writes landing 1 | of i-2: landing 0 again,
    swap_out lane                                   | D2H of i                         | D2H of i-1   after D2H of i
    this thread                                                  waits for D2H of i, squares, adds     ...
The first gradient after an update goes straight to its place in host memory: its copy is queued when it is accepted,
and the training thread waits for nothing. A gradient that is added to another, or that is kept on nvme, comes in tiles
through the staging slots, as this thread adds them; the training thread then runs ahead of the device by the two
buffers. The model's own unit, which is open during the whole backward, and small units have their own buffer.

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

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from .core import give_memory, take_memory
from .layout.footprint import LANDING_BUFFERS
from .layout.tile import Tile
from .memory.arena import Block
from .memory.slots import Slot, Slots
from .memory.transfers import InFlight
from .monitor import Worker
from .protocols import Started, TileView
from .streams import Mark, Streams
from .tiles.gradients import GradientStore
from .tiles.parameters import ParameterStore
from .tiles.store_context import Shared


class Upload:
    """The copy of unit `unit` into `out`. A zero-core `Arrival`."""

    __slots__ = ("_uploads", "after", "copied", "out", "unit")

    def __init__(self, uploads: Uploads, unit: int, out: Tensor, after: Mark) -> None:
        self._uploads, self.unit, self.out, self.after = uploads, unit, out, after
        self.copied: Any = None  # the mark of its copy, once that is queued

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
        self.waiting: dict[Upload, None] = {}  # those that have not begun

    def begin(self, i: int, out: Tensor) -> Upload:
        """Asks for unit i in `out` (shard_numel,) on the compute device, after the work on the caller's stream."""
        upload = Upload(self, i, out, self._streams.mark())
        with self._monitor.condition:
            self.waiting[upload] = None
            if not self._monitor.updates[i]:
                self._host.prefetch(i)
            self.poll()
        return upload

    def poll(self) -> None:
        """Begins all copies that can begin without waiting. Called from any thread."""
        if not self.waiting:
            return
        with self._monitor.condition:
            for upload in list(self.waiting):
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
        self._streams.follow(upload.copied)

    def drop(self, upload: Upload) -> None:
        """Cancels an upload that has not begun; makes the caller's stream wait for one that has."""
        with self._monitor.condition:
            self.waiting.pop(upload, None)
        if upload.copied is not None:
            self._streams.follow(upload.copied)

    def _copy(self, upload: Upload, source: Tensor) -> None:
        """Begins the copy. The caller holds the condition."""
        self.waiting.pop(upload, None)
        copied = self._on_device(upload.unit, upload.out, upload.after)
        if copied is None:
            copied = self._streams.copy("swap_in", upload.out, source, (upload.after,))
            self._host.leaving(upload.unit, copied)
            self._in_flight.count("swap_in", source.nbytes)
        upload.copied = copied


@dataclass(eq=False)
class _Download:
    """One gradient on the device: its `values` (shard_numel,), which are there after the mark `complete`."""

    unit: int
    values: Tensor
    complete: Mark
    landing: Slot[Tensor] | None  # the landing buffer of `values`; None: it is the caller's memory
    into: Tensor | None  # its place in host memory, if it goes straight there
    copied: Any = None  # the mark of its last copy, once that is queued


class Downloads:
    """Accepts gradients from the device, one after another."""

    def __init__(self, shared: Shared, streams: Streams, gradients: GradientStore) -> None:
        plan, monitor, in_flight = shared.plan, shared.monitor, shared.in_flight
        self._streams, self._gradients, self._plan, self._monitor = streams, gradients, plan, monitor
        self._staging, self._in_flight = shared.blocks(plan.staging_slots, plan.staging_slot_bytes), in_flight
        numel, dtype = plan.landing_numel, gradients.dtype

        def landings(count: int, numel: int) -> Slots[Tensor]:
            memories = [streams.empty(numel, dtype) for _ in range(count)]
            return Slots(memories, in_flight, monitor.condition, follow=streams.follow)

        self._shared = landings(LANDING_BUFFERS if numel else 0, numel)
        self._own = {i: landings(1, plan.units[i].spec.numel) for i in plan.own_landings}
        self._lent: dict[int, Slot[Tensor]] = {}
        self._worker = Worker("zero-offload gradients", monitor, self._finish, enter=streams.enter_thread)
        self.close = self._worker.close

    # -- the training thread ------------------------------------------------------------------------------------

    def lend(self, i: int) -> Tensor | None:
        """A landing buffer (shard_numel,), written in stream order, then accepted or forgotten. None: none free."""
        unit = self._plan.units[i]
        if not unit.trainable or not unit.spec.numel:
            return None
        if i not in self._lent:
            landings = self._landings(i)
            if landings is self._shared and len(self._lent.keys() - self._own.keys()) == LANDING_BUFFERS:
                return None
            self._monitor.wait_until(lambda: bool(landings.idle()), unit.spec.name)
            self._lent[i] = landings.take(None)
        return self._lent[i].memory[: unit.spec.numel]

    def accept(self, i: int, gradient: Tensor) -> None:
        """Takes a gradient (shard_numel,) on the device, which may be overwritten afterwards in stream order."""
        unit = self._plan.units[i]
        if not unit.trainable:
            return
        lent = self.lend(i)
        landing = self._lent.pop(i, None)
        if lent is not None:
            if lent.data_ptr() != gradient.data_ptr():
                lent.copy_(gradient)
            gradient = lent
        complete = self._streams.mark()
        with self._monitor.condition:
            # If the thread still adds another gradient of this unit, the kept one changes: this one comes after it.
            under_way = any(each.unit == i for each in self._worker.asked())
            download = _Download(i, gradient, complete, landing, None if under_way else self._gradients.lend(i))
            if download.into is not None:
                self._copied(download, self._copy(download, download.into, gradient))
            self._worker.put(download)
        if landing is None:  # both buffers are lent to units around this one, and the caller will reuse its memory
            self._monitor.wait_until(lambda: download.copied is not None, unit.spec.name)
            self._streams.follow(download.copied)

    def wait(self) -> None:
        """Returns when every accepted gradient is added."""
        self._monitor.wait_until(self._worker.idle, "gradients")

    def forget(self) -> None:
        """Takes back all landing buffers that are lent: their gradients will not be accepted."""
        with self._monitor.condition:
            for i, landing in self._lent.items():
                self._landings(i).give(landing)
            self._lent.clear()

    def _landings(self, i: int) -> Slots[Tensor]:
        return self._own.get(i, self._shared)

    def drop(self) -> None:
        """Drops the device's memory. Called while the lanes are empty."""
        for landings in (self._shared, *self._own.values()):
            landings.clear()
        self._lent.clear()

    def let_go(self) -> None:
        """Frees the memory of all landing buffers that are not lent. Called while the lanes are empty."""
        give_memory(slot.memory for slots in (self._shared, *self._own.values()) for slot in slots.idle())

    def take_back(self) -> None:
        """The inverse of `let_go`."""
        take_memory(slot.memory for slots in (self._shared, *self._own.values()) for slot in slots)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _finish(self, download: _Download) -> None:
        """Adds the gradient to the kept one, after waiting for its copies."""
        if download.into is not None:
            download.copied.wait()
        name = self._plan.units[download.unit].spec.name
        with self._monitor.span("norm", name):
            if download.into is not None:
                self._gradients.accept(download.unit, download.into)
            else:
                pieces = self._pieces(download)

                def part(start: int, stop: int) -> Tensor:
                    tile, values = next(pieces)
                    assert (tile.start, tile.stop) == (start, stop), f"{tile} is next, and not [{start}, {stop})"
                    return values

                self._gradients.accept_pieces(download.unit, part)

    def _copy(self, download: _Download, into: Tensor, source: Tensor) -> Mark:
        self._in_flight.count("swap_out", source.nbytes)
        return self._streams.copy("swap_out", into, source, (download.complete,))

    def _copied(self, download: _Download, mark: Mark) -> None:
        """Called when every copy out of the gradient's device memory is queued, the last with `mark`."""
        with self._monitor.condition:
            download.copied = mark
            if download.landing is not None:
                download.landing.leaves(mark)
                self._landings(download.unit).give(download.landing)
            self._monitor.condition.notify_all()

    def _pieces(self, download: _Download) -> Iterator[tuple[Tile, Tensor]]:
        """The gradient tile by tile, through the staging slots. A tile is valid until the next one; as many are copied
        ahead as there are slots."""
        waiting, ahead = deque(self._gradients.kept[download.unit]), deque[tuple[Slot[Block], Tile, Tensor]]()
        staging = Slots(self._staging, self._in_flight)
        while waiting or ahead:
            while waiting and (slot := staging.try_take(waiting[0])) is not None:
                tile = waiting.popleft()
                values = slot.memory.view(download.values.dtype, tile.numel)
                mark = self._copy(download, values, download.values[tile.start : tile.stop])
                slot.fills(mark)
                ahead.append((slot, tile, values))
                if not waiting:
                    self._copied(download, mark)
            slot, tile, values = ahead.popleft()
            slot.wait_filled()
            yield tile, values
            staging.give(slot)


class Visits:
    """The visits of one store's tiles to the device. Only the update thread calls it."""

    def __init__(self, streams: Streams, in_flight: InFlight) -> None:
        self._streams, self._in_flight = streams, in_flight

    def start(self, tile: TileView, update: Callable[[TileView], None]) -> Started:
        """Queues the tile's copies to the device, calls `update` with it there, and queues the copies back.

        On an error, of `update` for example, raises it after all queued work of the lanes is done.
        """
        try:
            with self._streams.inside("update_in"):
                states = {name: self._up(values) for name, values in tile.states.items()}
                there = TileView(states, self._up(tile.parameter), self._up(tile.gradient), tile.uncut)
                arrived = self._streams.mark()
            with self._streams.inside("update"):
                self._streams.follow(arrived)
                update(there)
                over = self._streams.mark()
            with self._streams.inside("update_out"):
                self._streams.follow(over)
                for name, values in tile.states.items():
                    self._down(values, there.states[name])
                back = self._down(tile.parameter, there.parameter)
            return cast(Any, SimpleNamespace(done=back.done, wait=back.wait, keeps=there))  # its memory, until then
        except BaseException:
            self._streams.drain()
            raise

    def _up(self, values: Tensor) -> Tensor:
        there = self._streams.empty(values.numel(), values.dtype)
        self._streams.copy("update_in", there, values)
        self._in_flight.count("swap_in", values.nbytes)
        return there

    def _down(self, values: Tensor, there: Tensor) -> Mark:
        self._in_flight.count("swap_out", values.nbytes)
        return self._streams.copy("update_out", values, there)

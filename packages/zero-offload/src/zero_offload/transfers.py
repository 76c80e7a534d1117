"""What is in flight: reads, writes and copies. Owns their memory until they end, their names, times, counts and order.

Who may use which memory is `slots`'; where tiles are kept is `tiles`'.

[Note: one record]
Every request touches places: a slot, a block of the arena, what a ByteStore keeps. `InFlight` knows which bytes of
which place each request reads or writes, and nobody else remembers that. While tile 7 is read into slot 3:

    place           touched by                              who asks
    slot 3          the read, which writes all of it        filled() and changeable() of the slot
    stored tile 7   the read, which reads bytes [0, n)      a read or write of the same bytes waits for writes of them

A request is forgotten when somebody has seen that it is over. One that failed stays, and raises its error in everyone
who asks for what it touched, until the place is given to others.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .errors import START_AGAIN, SwapError
from .protocols import ByteStore, Extent, Ticket
from .timeline import Timeline

__all__ = ["InFlight", "Moving", "Stored", "Stores", "Transfer", "Transfers"]

END = sys.maxsize


class Moving(Protocol):
    """A `Transfer`, or a copy (`streams.Mark`). Any thread may ask, as often as it likes."""

    def done(self) -> bool:
        """Whether wait() would return at once."""

    def wait(self) -> None:
        """Raises the error of a transfer that failed, each time."""


class Transfer:
    """A submitted read or write that knows what it moves, and keeps its memory."""

    __slots__ = ("_extent", "_offset", "_store", "buffer", "kind", "start_ns", "ticket", "what")

    def __init__(self, store: ByteStore, kind: str, what: str, extent: Extent, buffer: Tensor, offset: int) -> None:
        """Submit it. kind: "swap_in" or "swap_out". Raises SwapError as `wait` does."""
        self._store, self.kind, self.what = store, kind, what
        self._extent, self.buffer, self._offset = extent, buffer, offset
        self.start_ns = time.perf_counter_ns()
        submit = store.read if kind == "swap_in" else store.write
        try:
            self.ticket: Ticket = submit(extent, buffer, offset)
        except Exception as error:
            raise self._explained(error) from error

    def done(self) -> bool:
        return self.ticket.done()

    def wait(self) -> None:
        """Raises SwapError naming what was moved, where, and why it failed; each time."""
        try:
            self.ticket.wait()
        except Exception as error:
            error.__context__ = None  # a ticket raises one error each time: its context may be what it has caused
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> SwapError:
        """With file and offset from the store's own error where it has them."""
        path = getattr(error, "path", None) or getattr(error, "filename", None) or type(self._store).__name__
        at = getattr(error, "offset", None)
        at = self._extent.offset_bytes + self._offset if at is None else at
        verb = "reading" if self.kind == "swap_in" else "writing"
        explained = SwapError(
            f"{verb} {self.what} failed: {path}, offset {at}, {self.buffer.nbytes} bytes: {error}; "
            f"check the device and its free space, then {START_AGAIN}"
        )
        explained.errno = getattr(error, "errno", None)
        return explained


class InFlight:
    """The only record of what is in flight. Any thread."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        # Reentrant: what is forgotten drains in a finaliser, which may come at any line.
        self._lock = threading.RLock()
        self._touching: dict[Hashable, dict[Moving, tuple[int, int, bool]]] = {}  # by place: [start, stop), writes
        self._moved: Counter[Hashable] = Counter()

    def begin(self, request: Moving, place: Hashable, start: int = 0, stop: int = END, *, writes: bool) -> None:
        """The request touches bytes [start, stop) of the place, and writes them or reads them.

        A copy replaces earlier copies of the same bytes in the same direction: they end before it, in the same lane.
        """
        with self._lock:
            touching = self._touching.setdefault(place, {})
            if not isinstance(request, Transfer):
                for earlier in [each for each, touched in touching.items() if touched == (start, stop, writes)]:
                    if not isinstance(earlier, Transfer):
                        del touching[earlier]
            touching[request] = (start, stop, writes)

    def of(self, place: Hashable, start: int = 0, stop: int = END, *, writes: bool = False) -> list[Moving]:
        """What touches these bytes, or only what `writes` them."""
        with self._lock:
            touching = self._touching.get(place, {})
            return [
                each
                for each, (first, last, changes) in touching.items()
                if first < stop and last > start and (changes or not writes)
            ]

    def wait(self, requests: Iterable[Moving]) -> None:
        """Return when these are over. Raises the error of the first that failed."""
        for request in requests:
            request.wait()
            self._ended(request)

    def _ended(self, request: Moving) -> None:
        with self._lock:
            found = False
            for place, touching in list(self._touching.items()):
                found |= touching.pop(request, None) is not None
                if not touching:
                    del self._touching[place]
        if found and isinstance(request, Transfer):
            now = time.perf_counter_ns()
            self.timeline.transfer(request.kind, request.what, request.start_ns, now, request.buffer.nbytes)

    def forget(self, place: Hashable, *, writes: bool = True) -> None:
        """Whoever asks for the place after this does not wait for requests that began earlier, or, without `writes`,
        not for those that only read it."""
        with self._lock:
            touching = self._touching.pop(place, {})
            if not writes and (kept := {each: touched for each, touched in touching.items() if touched[2]}):
                self._touching[place] = kept

    def _transfers(self) -> list[Transfer]:
        with self._lock:
            found = {each for touching in self._touching.values() for each in touching if isinstance(each, Transfer)}
        return list(found)

    def poll(self) -> bool:
        """Note the time of every transfer that is over by now, so that the timeline shows transfers and not waits.

        True while one is not over.
        """
        moving = False
        for transfer in self._transfers():
            if not transfer.done():
                moving = True
            else:
                with contextlib.suppress(Exception):  # whoever asks for its bytes raises it
                    self.wait([transfer])
        return moving

    def drain(self) -> None:
        """Return when every transfer has ended, with or without an error."""
        for transfer in self._transfers():
            with contextlib.suppress(Exception):
                self.wait([transfer])

    def count(self, what: Hashable, nbytes: int) -> None:
        """Add `nbytes` to the bytes that have moved under the caller's name `what`."""
        with self._lock:
            self._moved[what] += nbytes

    def moved(self, what: Hashable) -> int:
        """Bytes of `what` that have been counted."""
        return self._moved[what]


@dataclass(frozen=True, eq=False)
class Stored:
    """Bytes that a ByteStore keeps. No request of them overtakes a write. One thread at a time reads and writes."""

    transfers: Transfers
    extent: Extent

    @property
    def nbytes(self) -> int:
        return self.extent.nbytes

    def read(self, buffer: Tensor, what: str, offset: int = 0) -> Transfer:
        """Begin to fill `buffer` (uint8). Waits for writes of the same bytes, and raises their errors."""
        return self._begin("swap_in", buffer, what, offset)

    def write(self, buffer: Tensor, what: str, offset: int = 0) -> Transfer:
        """Begin to store `buffer` (uint8). Waits as `read` does, because two requests in flight have no order."""
        return self._begin("swap_out", buffer, what, offset)

    def _begin(self, kind: str, buffer: Tensor, what: str, offset: int) -> Transfer:
        transfers, span = self.transfers, (offset, offset + buffer.nbytes)
        self.drain(*span)
        transfer = Transfer(transfers.store, kind, what, self.extent, buffer, offset)
        transfers.in_flight.begin(transfer, self, *span, writes=kind == "swap_out")
        transfers.in_flight.count((transfers, kind), buffer.nbytes)
        transfers.in_flight.poll()
        return transfer

    def drain(self, start: int = 0, stop: int = END) -> None:
        """Return when bytes [start, stop) are not being written."""
        self.transfers.in_flight.wait(self.transfers.in_flight.of(self, start, stop, writes=True))

    def writing(self) -> bool:
        """Whether `drain` would wait."""
        return not all(each.done() for each in self.transfers.in_flight.of(self, writes=True))

    def free(self) -> None:
        """Give the room back; nothing is in flight."""
        self.transfers.in_flight.forget(self)
        self.transfers.store.free(self.extent)


class Transfers:
    """The ByteStore of a tier, with its requests in the record, and what was allocated there."""

    def __init__(self, store: ByteStore, in_flight: InFlight, tier: str = "nvme") -> None:
        self.store, self.in_flight, self.tier = store, in_flight, tier
        self.alignment = int(store.alignment)
        self._owned: list[Stored] = []

    def allocate(self, nbytes: int) -> Stored:
        """Room for `nbytes`, which the caller frees."""
        return Stored(self, self.store.allocate(nbytes))

    def own(self, nbytes: int) -> Stored:
        """Room for `nbytes`, which `free` gives back."""
        self._owned.append(self.allocate(nbytes))
        return self._owned[-1]

    def free(self) -> None:
        """Give everything owned back; nothing is in flight."""
        while self._owned:
            with contextlib.suppress(Exception):  # the ByteStore's owner may have closed it already
                self._owned.pop().free()

    def laid_out(self) -> None:
        """What has moved until now was the first layout of the shards, and is counted apart."""
        for kind in ("swap_in", "swap_out"):
            self.in_flight.count((self, kind, "setup"), self.in_flight.moved((self, kind)))

    @property
    def read_bytes(self) -> int:
        return self.in_flight.moved((self, "swap_in")) - self.in_flight.moved((self, "swap_in", "setup"))

    @property
    def write_bytes(self) -> int:
        return self.in_flight.moved((self, "swap_out")) - self.setup_write_bytes

    @property
    def setup_write_bytes(self) -> int:
        return self.in_flight.moved((self, "swap_out", "setup"))


class Stores(dict[str, Transfers]):
    """Every stored tier that there is, by its name, with one record of what is in flight."""

    def __init__(self, stores: Mapping[str, ByteStore], in_flight: InFlight) -> None:
        super().__init__({tier: Transfers(store, in_flight, tier) for tier, store in stores.items()})
        self.in_flight = in_flight

    def free(self) -> None:
        """As `Transfers.free`."""
        for transfers in self.values():
            transfers.free()

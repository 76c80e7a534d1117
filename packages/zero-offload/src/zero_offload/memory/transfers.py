"""Tracks reads, writes and copies in flight. Owns their memory until they end, their names, times, counts and order.

Not here: which memory may be used (in slots.py), and where tiles are kept (in tiles).

[Note: one record]
Every request touches places: a slot, a block of the arena, an extent of a ByteStore. `InFlight` is the only record of
the bytes that each request reads or writes in each place. While tile 7 is read into slot 3:

    place           touched by                              who asks
    slot 3          the read, which writes all of it        filled() and changeable() of the slot
    stored tile 7   the read, which reads bytes [0, n)      a read or write of the same bytes waits for writes of them

A request is removed once a caller has seen that it is complete. A failed request stays, and raises its error in every
caller that asks for the same bytes, until the place is reused.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..errors import START_AGAIN, PlacementError, SwapError
from ..protocols import ByteStore, Extent, Started, Ticket
from ..tier import Tier
from ..timeline import Timeline

END = sys.maxsize


class Transfer:
    """A submitted read or write, with the name of its bytes. Keeps its memory alive."""

    __slots__ = ("_extent", "_offset", "_store", "buffer", "lane", "start_ns", "ticket", "what")

    def __init__(self, store: ByteStore, kind: str, what: str, extent: Extent, buffer: Tensor, offset: int) -> None:
        """Submits the request. kind: "swap_in" or "swap_out". Raises SwapError as `wait` does."""
        self._store, self.lane, self.what = store, kind, what
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
        """Raises SwapError, on every call, with the name of the bytes, the file and the cause."""
        try:
            self.ticket.wait()
        except Exception as error:
            error.__context__ = None  # a ticket raises one object each time; its context may be its own effect
            raise self._explained(error) from error

    def _explained(self, error: Exception) -> SwapError:
        """Adds file and offset, from the store's own error if it has them."""
        path = getattr(error, "path", None) or getattr(error, "filename", None) or type(self._store).__name__
        at = getattr(error, "offset", None)
        at = self._extent.offset_bytes + self._offset if at is None else at
        verb = "reading" if self.lane == "swap_in" else "writing"
        disk = "check the disk and its free space, then " if isinstance(error, OSError) else ""
        explained = SwapError(
            f"{verb} {self.what} failed: {path}, offset {at}, {self.buffer.nbytes} bytes: {error}; {disk}{START_AGAIN}"
        )
        explained.errno = getattr(error, "errno", None)
        return explained


class InFlight:
    """The only record of requests in flight. May be called from any thread."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        # Reentrant: a store that is garbage-collected drains in a finaliser, which may run at any line.
        self._lock = threading.RLock()
        self._touching: dict[Hashable, dict[Started, tuple[int, int, bool]]] = {}  # by place: [start, stop), writes
        self._moved: Counter[Hashable] = Counter()

    def begin(self, request: Started, place: Hashable, start: int = 0, stop: int = END, *, writes: bool) -> None:
        """Records that the request writes, or else reads, bytes [start, stop) of the place.

        A copy replaces earlier copies of the same bytes in the same direction: they end before it, in the same lane.
        """
        with self._lock:
            touching = self._touching.setdefault(place, {})
            if not isinstance(request, Transfer):
                for earlier in [each for each, touched in touching.items() if touched == (start, stop, writes)]:
                    if not isinstance(earlier, Transfer):
                        del touching[earlier]
            touching[request] = (start, stop, writes)

    def of(self, place: Hashable, start: int = 0, stop: int = END, *, writes: bool = False) -> list[Started]:
        """Returns the requests that touch these bytes. writes: only those that write them."""
        with self._lock:
            touching = self._touching.get(place, {})
            return [
                each
                for each, (first, last, changes) in touching.items()
                if first < stop and last > start and (changes or not writes)
            ]

    def wait(self, requests: Iterable[Started]) -> None:
        """Waits until these are complete. Raises the error of the first that failed."""
        for request in requests:
            request.wait()
            self._ended(request)

    def _ended(self, request: Started) -> None:
        with self._lock:
            found = False
            for place, touching in list(self._touching.items()):
                found |= touching.pop(request, None) is not None
                if not touching:
                    del self._touching[place]
        if found and isinstance(request, Transfer):
            now = time.perf_counter_ns()
            self.timeline.transfer(request.lane, request.what, request.start_ns, now, request.buffer.nbytes)

    def forget(self, place: Hashable, *, writes: bool = True) -> None:
        """Removes the place's requests from the record, so that nobody waits for them. writes=False: only its reads."""
        with self._lock:
            touching = self._touching.pop(place, {})
            if not writes and (kept := {each: touched for each, touched in touching.items() if touched[2]}):
                self._touching[place] = kept

    def _transfers(self) -> list[Transfer]:
        with self._lock:
            found = {each for touching in self._touching.values() for each in touching if isinstance(each, Transfer)}
        return list(found)

    def poll(self) -> bool:
        """Notes the end of every transfer that is complete, so that the timeline shows transfers and not waits.

        Returns whether any is still in flight.
        """
        moving = False
        for transfer in self._transfers():
            if not transfer.done():
                moving = True
            else:
                with contextlib.suppress(Exception):  # a caller that asks for its bytes gets it
                    self.wait([transfer])
        return moving

    def drain(self) -> None:
        """Waits until every transfer has ended, with or without an error."""
        for transfer in self._transfers():
            with contextlib.suppress(Exception):
                self.wait([transfer])

    def count(self, what: Hashable, nbytes: int) -> None:
        """Adds `nbytes` to the count of the caller's key `what`."""
        with self._lock:
            self._moved[what] += nbytes

    def moved(self, what: Hashable) -> int:
        """Returns the bytes counted for the key `what`."""
        return self._moved[what]


@dataclass(frozen=True, eq=False)
class Stored:
    """An extent of a ByteStore. No request overtakes a write of the same bytes. One thread at a time uses it."""

    transfers: Transfers
    extent: Extent

    @property
    def nbytes(self) -> int:
        return self.extent.nbytes

    def read(self, buffer: Tensor, what: str, offset: int = 0) -> Transfer:
        """Begins to fill `buffer` (uint8). Waits for writes of the same bytes, and raises their errors."""
        return self._begin("swap_in", buffer, what, offset)

    def write(self, buffer: Tensor, what: str, offset: int = 0) -> Transfer:
        """Begins to store `buffer` (uint8). Waits as `read` does, because two requests in flight have no order."""
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
        """Waits until no write of bytes [start, stop) is in flight."""
        self.transfers.in_flight.wait(self.transfers.in_flight.of(self, start, stop, writes=True))

    def writing(self) -> bool:
        """Whether `drain` would wait."""
        return not all(each.done() for each in self.transfers.in_flight.of(self, writes=True))

    def free(self) -> None:
        """Frees the extent. No request may be in flight."""
        self.transfers.in_flight.forget(self)
        self.transfers.store.free(self.extent)


class Transfers:
    """A tier's ByteStore. Allocates its extents, and records its requests in `InFlight`."""

    def __init__(self, store: ByteStore, in_flight: InFlight, tier: str = "nvme") -> None:
        self.store, self.in_flight, self.tier = store, in_flight, tier
        self.alignment = int(store.alignment)
        self._owned: list[Stored] = []

    def allocate(self, nbytes: int) -> Stored:
        """Allocates `nbytes`, which the caller frees."""
        return Stored(self, self.store.allocate(nbytes))

    def own(self, nbytes: int) -> Stored:
        """Allocates `nbytes`, which `free` frees."""
        self._owned.append(self.allocate(nbytes))
        return self._owned[-1]

    def free(self) -> None:
        """Frees all owned extents. No request may be in flight."""
        while self._owned:
            with contextlib.suppress(Exception):  # the ByteStore's owner may have closed it already
                self._owned.pop().free()

    def laid_out(self) -> None:
        """Ends the layout of the shards: the bytes moved until now are counted as setup, not as traffic."""
        for kind in ("swap_in", "swap_out"):
            self.in_flight.count((self, kind, "setup"), self.in_flight.moved((self, kind)))

    def moved(self, kind: str) -> int:
        """Bytes of the kind, "swap_in" or "swap_out", since the layout of the shards ended."""
        return self.in_flight.moved((self, kind)) - self.in_flight.moved((self, kind, "setup"))


class Stores(dict[str, Transfers]):
    """All stored tiers by name, with one record of the requests in flight. Raises PlacementError for a taken name."""

    def __init__(self, tiers: Mapping[str, ByteStore], nvme: ByteStore | None, in_flight: InFlight) -> None:
        for name in tiers:
            if not Tier(name).stored or (name == Tier.NVME and nvme is not None):
                raise PlacementError(f"tiers={{{name!r}: ...}}: a tier has this name; give this one another name")
        stores = dict(tiers) if nvme is None else {**tiers, str(Tier.NVME): nvme}
        super().__init__({tier: Transfers(store, in_flight, tier) for tier, store in stores.items()})
        self.in_flight = in_flight

    def free(self) -> None:
        """Frees all owned extents of every tier, see `Transfers.free`."""
        for transfers in self.values():
            transfers.free()

"""The tiers, and transfers to those that are stores of bytes. Owns their counting, timing, naming and ordering.

A tier is where bytes are; which tile goes where is `placement`'s, who holds which buffer is the slot pools'.

[Note: Tiers are data]
The tiers of a store are a list of names from fast to slow: "device", "host", then one name for each `ByteStore` that it
was given. "device" and "host" lend memory, in which a tile is used where it lies. Every other tier is `stored`: a tile
is read into a buffer of host memory, used there, and written back. No code asks for a tier by name to find out which.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from .errors import SwapError
from .protocols import ByteStore, Extent, Ticket
from .timeline import Timeline

__all__ = ["TIERS", "Stored", "Stores", "Tier", "Transfer", "Transfers", "tiers_with"]


class Tier(str):
    """The name of a tier. A tile's tier never changes while a store is attached."""

    DEVICE: ClassVar[Tier]
    HOST: ClassVar[Tier]
    NVME: ClassVar[Tier]

    @property
    def value(self) -> str:
        """The name alone."""
        return str(self)

    @property
    def stored(self) -> bool:
        """Whether it is a ByteStore, which begins reads and writes; else it lends memory."""
        return self not in (Tier.DEVICE, Tier.HOST)


Tier.DEVICE, Tier.HOST, Tier.NVME = Tier("device"), Tier("host"), Tier("nvme")
TIERS = (Tier.DEVICE, Tier.HOST, Tier.NVME)


def tiers_with(stored: Iterable[str]) -> tuple[Tier, ...]:
    """All tiers, fast to slow, with the `stored` ones between "host" and "nvme", unless "nvme" is one of them."""
    return tuple(dict.fromkeys((*TIERS[:2], *map(Tier, stored), Tier.NVME)))


class Transfer:
    """A submitted read or write that knows what it moves. Any thread may wait, as often as it likes."""

    __slots__ = (
        "_buffer",
        "_error",
        "_extent",
        "_nvme",
        "_offset",
        "_seen_ns",
        "_ticket",
        "kind",
        "nbytes",
        "start_ns",
        "what",
    )

    def __init__(
        self, nvme: Transfers, kind: str, what: str, ticket: Ticket, extent: Extent, offset: int, buffer: Tensor
    ):
        self.kind, self.what = kind, what
        self.nbytes = buffer.nbytes
        self._nvme, self._extent, self._offset = nvme, extent, offset
        # Until it was waited for: who remembers a transfer that is over does not keep its memory.
        self._ticket: Ticket | None = ticket
        self._buffer: Tensor | None = buffer
        self.start_ns = time.perf_counter_ns()
        self._seen_ns: int | None = None
        self._error: SwapError | None = None

    def done(self) -> bool:
        """Whether wait() would return at once; notes the time of the first yes."""
        if self._seen_ns is None:
            ticket = self._ticket
            if ticket is None or ticket.done():
                self._seen_ns = time.perf_counter_ns()
        return self._seen_ns is not None

    def wait(self) -> None:
        """Raises SwapError naming what was moved, where, and why it failed; each time."""
        ticket = self._ticket
        if ticket is not None:
            try:
                ticket.wait()
            except Exception as error:
                explained = self._nvme.explain(error, self.kind, self.what, self._extent, self._offset, self.nbytes)
                explained.__cause__ = error
                self._error = explained
            self.done()
            self._nvme.ended(self, self._seen_ns or time.perf_counter_ns())
            self._ticket = self._buffer = None
        if self._error is not None:
            raise self._error


class Stored:
    """Bytes that a ByteStore keeps, and the only record of what is being written there: no access overtakes a write.

    One thread at a time reads and writes.
    """

    def __init__(self, transfers: Transfers, extent: Extent) -> None:
        self._transfers, self._extent = transfers, extent
        self._writes: dict[tuple[int, int], Transfer] = {}  # by the bytes [start, stop) that they change
        self.nbytes = extent.nbytes

    def read(self, buffer: Tensor, what: str, offset: int = 0) -> Transfer:
        """Begin to fill `buffer` (uint8). Waits for writes of the same bytes, and raises their errors."""
        self._written(offset, offset + buffer.nbytes)
        return self._transfers.read(self._extent, buffer, what, offset)

    def write(self, buffer: Tensor, what: str, offset: int = 0) -> Transfer:
        """Begin to store `buffer` (uint8). Waits as `read` does, because two requests in flight have no order."""
        span = (offset, offset + buffer.nbytes)
        self._written(*span)
        self._writes[span] = transfer = self._transfers.write(self._extent, buffer, what, offset)
        return transfer

    def drain(self) -> None:
        """Return when nothing is being written."""
        self._written(0, self.nbytes)

    def _written(self, start: int, stop: int) -> None:
        for span in [span for span in self._writes if span[0] < stop and span[1] > start]:
            self._writes[span].wait()
            del self._writes[span]

    def free(self) -> None:
        """Give the room back; nothing is in flight."""
        self._transfers.store.free(self._extent)


class Transfers:
    """A ByteStore with names for what is moved, counters of it, and errors that say both."""

    def __init__(self, store: ByteStore, timeline: Timeline) -> None:
        self.store, self.timeline = store, timeline
        self.alignment = int(store.alignment)
        self._lock = threading.Lock()
        self._owned: list[Stored] = []
        self._outstanding: set[Transfer] = set()  # keeps their memory alive, whoever forgot them
        self._read_bytes = self._write_bytes = 0

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

    def read(self, extent: Extent, buffer: Tensor, what: str, offset: int = 0) -> Transfer:
        """Begin to fill `buffer` (uint8) from the extent."""
        with self._lock:
            self._read_bytes += buffer.nbytes
        return self._submit("swap_in", self.store.read, extent, buffer, what, offset)

    def write(self, extent: Extent, buffer: Tensor, what: str, offset: int = 0) -> Transfer:
        """Begin to store `buffer` (uint8) in the extent."""
        with self._lock:
            self._write_bytes += buffer.nbytes
        return self._submit("swap_out", self.store.write, extent, buffer, what, offset)

    def _submit(self, kind: str, submit: Any, extent: Extent, buffer: Tensor, what: str, offset: int) -> Transfer:
        try:
            ticket = submit(extent, buffer, offset)
        except Exception as error:
            raise self.explain(error, kind, what, extent, offset, buffer.nbytes) from error
        transfer = Transfer(self, kind, what, ticket, extent, offset, buffer)
        with self._lock:
            self._outstanding.add(transfer)
        self.poll()
        return transfer

    def ended(self, transfer: Transfer, stop_ns: int) -> None:
        """The transfer was waited for."""
        with self._lock:
            if transfer not in self._outstanding:
                return
            self._outstanding.discard(transfer)
        self.timeline.transfer(transfer.kind, transfer.what, transfer.start_ns, stop_ns, transfer.nbytes)

    def poll(self) -> bool:
        """Note the time of whatever is complete by now, so that the timeline shows transfers and not waits.

        True while something is not complete.
        """
        with self._lock:
            outstanding = tuple(self._outstanding)
        return not all([transfer.done() for transfer in outstanding])

    def drain(self) -> None:
        """Return when nothing is in flight, whatever becomes of it."""
        with self._lock:
            outstanding = tuple(self._outstanding)
        for transfer in outstanding:
            with contextlib.suppress(Exception):
                transfer.wait()

    def explain(self, error: Exception, kind: str, what: str, extent: Extent, offset: int, nbytes: int) -> SwapError:
        """The error of a transfer, with file and offset from the store's own error where it has them."""
        path = getattr(error, "path", None) or getattr(error, "filename", None) or type(self.store).__name__
        at = getattr(error, "offset", None)
        at = extent.offset_bytes + offset if at is None else at
        verb = "reading" if kind == "swap_in" else "writing"
        explained = SwapError(
            f"{verb} {what} failed: {path}, offset {at}, {nbytes} bytes: {error}; "
            "check the device and its free space, then resume from the last checkpoint"
        )
        explained.errno = getattr(error, "errno", None)
        return explained

    @property
    def read_bytes(self) -> int:
        return self._read_bytes

    @property
    def write_bytes(self) -> int:
        return self._write_bytes


class Stores(dict[str, Transfers]):
    """The transfers of every stored tier that there is, by its name."""

    def poll(self) -> bool:
        """As `Transfers.poll`."""
        return any([transfers.poll() for transfers in self.values()])

    def drain(self) -> None:
        """As `Transfers.drain`."""
        for transfers in self.values():
            transfers.drain()

    def free(self) -> None:
        """As `Transfers.free`."""
        for transfers in self.values():
            transfers.free()

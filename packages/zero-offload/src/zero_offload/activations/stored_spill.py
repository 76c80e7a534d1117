"""Moves tensors to a stored tier between forward and backward, through a few slots of host memory.

Owns the extents, the order of reads, and the thread that does the same for tensors of a discrete device. Not here: a
tensor's layout (in spill.py).

[Note: a tensor's life]
A tensor is cut into pieces of one slot. A slot is written out at once and keeps its bytes until another piece needs it,
so the tensors that were packed last, which backward wants first, are not read at all:

    forward    pack 0 | pack 1 | pack 2 | pack 3          writes run behind; a slot is free when its write is done
    slots      [0]      [0 1]    [0 1 2]  [3 1 2]
    backward   load 3 (there) | load 2 (there) | load 1 (there), begins to read 0 | load 0 (read by then)
Memory is the slots, however deep the model. A tensor's extent goes back to the tier when the graph that wanted it dies.

[Note: stored, and nobody waits]
    compute stream   forward of 0 | of 1 | of 2            a tensor's memory is reused after its copies: before 2 is
    this thread      waits for a slot, queues the copy     packed, the stream has followed those of 0
    swap_out lane    0's pieces | 1's ...
    this thread      waits for a piece's copy, writes it   a slot is free when its write is done
    backward         load 2, asks for 1 | load 1, asks for 0
    this thread      waits for a read, queues the copy; the stream follows the last one
The training thread waits where it is ahead by more than the tensors that may leave, until copies of the oldest are
queued; and in backward where a tensor's reads are not done. Neither a copy nor a kernel is waited for on the host.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import BudgetError, ClosedError, gib
from ..layout.footprint import SPILL_PIECE_BYTES, SPILL_SLOTS
from ..layout.tile import round_up
from ..memory.arena import PAGE_BYTES, Arena
from ..memory.slots import Slot, Slots
from ..memory.transfers import Stored, Transfers
from ..monitor import Ending, Monitor, Worker
from ..streams import Lane, Mark, Streams
from .spill import Crossing, DiscreteSpill, Form, Packed, Spill, Spilled

_AGAIN = "end other threads or raise ulimit -u, then close() the activation offload and call offload_activations again"
Copy = Callable[[Lane, Tensor, Tensor], "Mark | None"]  # (lane, into, source): done when the mark is, or done (None)


@dataclass(eq=False)
class _Span:
    """Bytes [start, start + nbytes) of a tensor, and of its extent."""

    start: int
    nbytes: int


@dataclass(eq=False)
class OnTier(Packed):
    """A tensor on the tier. Its extent is freed when nothing refers to it any more."""

    stored: Stored
    pieces: list[_Span]

    def __del__(self) -> None:
        self.spill.drop(self)


class StoredSpill(Spill):
    """Sets tensors aside on a ByteStore. `transfers`: the TieredStore's, with its names, counts and errors.

    Any thread may pack and load; a lock admits one at a time.
    """

    def __init__(self, transfers: Transfers, *, slots: int = SPILL_SLOTS, piece_bytes: int = SPILL_PIECE_BYTES) -> None:
        if slots < 2:
            raise ValueError(f"slots={slots}: at least 2, one being written or read beside the one in use")
        self._transfers = transfers
        self._piece_bytes = round_up(piece_bytes, transfers.alignment)
        self.host_bytes = slots * round_up(self._piece_bytes, PAGE_BYTES)  # of the slots
        # Every later call raises the first error of a transfer too: the stored bytes cannot be relied on any more.
        self._monitor = Monitor(transfers.in_flight.timeline, way_out=_AGAIN)
        memory, self._stop, release = self._memory()
        self._slots = Slots(memory.split(round_up(self._piece_bytes, PAGE_BYTES)), transfers.in_flight)
        self._all: list[Stored] = []
        self._last: Callable[[], Any] = lambda: None
        self._lock = threading.RLock()
        self.dropped: deque[tuple[Stored, list[_Span]]] = deque()
        # Also when model and graphs are forgotten without a close(): the ByteStore may live on.
        self._ending = Ending(self, partial(_give_back, self._stop, release, self._slots, self._all))

    def _memory(self) -> tuple[Tensor, Callable[[], None], Callable[[], None]]:
        """(host_bytes,) uint8 for the slots; a function that stops their user, and one that frees them."""
        arena = Arena(self.host_bytes)
        return arena.whole(), lambda: None, arena.close

    @property
    def extent_bytes(self) -> int:
        """Bytes of extents on the tier, in use or about to be freed."""
        return sum(stored.nbytes for stored in self._all)

    def pack(self, tensor: Tensor, what: str) -> Spilled:
        """Begins to write the tensor. Its own memory is not needed after this returns."""
        with self._lock, self._guard():
            self._collect()
            spilled, values = self._begin(tensor, what)
            self._write_pieces(spilled, values, _copy)
            return spilled

    def _begin(self, tensor: Tensor, what: str) -> tuple[OnTier, Tensor]:
        """Allocates the tensor's extent. Returns its `OnTier`, and its values as bytes in their present memory."""
        form = Form.of(tensor)
        values = form.flatten(tensor)
        pieces = [
            _Span(start, min(self._piece_bytes, values.numel() - start))
            for start in range(0, values.numel(), self._piece_bytes)
        ]
        stored = self._room_for(round_up(values.numel(), self._transfers.alignment), what)
        spilled = OnTier(self, what, form, self._last, stored, pieces)
        self._last = weakref.ref(spilled)
        return spilled, values

    def _write_pieces(self, spilled: OnTier, values: Tensor, copy: Copy) -> None:
        """Copies each piece into a slot, and writes it when its copy is done, while the next one is copied."""

        def fill(slot: Slot[Tensor]) -> None:
            copied = copy("swap_out", slot.memory[: slot.key.nbytes], _part(values, slot.key))
            if copied is not None:
                slot.fills(copied)

        behind: Slot[Tensor] | None = None
        for piece in [*spilled.pieces, None]:
            slot = None if piece is None else self._slots.take(piece, fill=fill)
            if behind is not None:
                self._write(spilled, behind)
            behind = slot

    def _write(self, spilled: OnTier, slot: Slot[Tensor]) -> None:
        try:
            slot.wait_filled()
            slot.leaves(spilled.stored.write(*self._transfer(spilled, slot)))
        finally:
            self._slots.keep(slot, due=-self._slots.tick())  # backward wants the last packed tensors first

    def load(self, spilled: OnTier) -> Tensor:
        """The tensor again. Begins to read the one that was packed before it."""
        with self._lock, self._guard():
            values = torch.empty(spilled.form.core, dtype=spilled.form.dtype, device="cpu")
            self._read_pieces(spilled, values.view(-1).view(torch.uint8), _copy)
            return spilled.form.restore(values)

    def _read_pieces(self, spilled: OnTier, values: Tensor, copy: Copy) -> None:
        """Copies each piece out of its slot, after reading it if need be. Begins to read the tensor packed before."""
        for piece in spilled.pieces:
            slot = self._slots.take(piece, fill=partial(self._read, spilled))
            try:
                slot.wait_filled()
                copied = copy("swap_in", _part(values, piece), slot.memory[: piece.nbytes])
                if copied is not None:
                    slot.leaves(copied)
            finally:
                self._slots.keep(slot)  # backward is done with it
        self._read_ahead(spilled)

    def _read_ahead(self, spilled: OnTier) -> None:
        """Begins to read the tensor packed before this one, into slots whose values nobody wants."""
        before = spilled.before()
        if before is None:
            return
        for piece in before.pieces:
            if self._slots.find(piece) is None:
                if not self._slots.idle(steal=False):
                    return
                ahead = self._slots.take(piece, fill=partial(self._read, before))
                self._slots.keep(ahead, due=-self._slots.tick())

    def _read(self, spilled: OnTier, slot: Slot[Tensor]) -> None:
        slot.fills(spilled.stored.read(*self._transfer(spilled, slot)))

    def _transfer(self, spilled: OnTier, slot: Slot[Tensor]) -> tuple[Tensor, str, int]:
        """The arguments of a read or write of the slot's piece."""
        nbytes = round_up(slot.key.nbytes, self._transfers.alignment)
        return slot.memory[:nbytes], f"activation of {spilled.what}", slot.key.start

    def close(self) -> None:
        """Waits for transfers in flight, then frees all memory and extents. Idempotent."""
        with self._lock:
            told = self._monitor.failure is not None
            self._monitor.fail(ClosedError("the activation offload is closed; call offload_activations again"))
            self._stop()
            try:
                self._slots.drain()
            except OSError:
                if not told:
                    raise
            finally:
                self.host_bytes = 0
                self._ending()

    def drop(self, spilled: OnTier) -> None:
        """Notes that the tensor's graph died, which may happen on any thread at any time."""
        self.dropped.append((spilled.stored, spilled.pieces))

    # -- extents ----------------------------------------------------------------------------------------------------

    def _room_for(self, nbytes: int, what: str) -> Stored:
        """Allocates an extent. Raises BudgetError if the tier has no room; earlier extents stay."""
        try:
            self._all.append(self._transfers.allocate(nbytes))
        except (OSError, BudgetError) as error:
            raise BudgetError(
                f"no room on {self._transfers.tier} for {gib(nbytes)} of activations of {what}. Take fewer tokens a "
                f'micro-batch. Or give some units the policy "recompute". Or make room: {error}'
            ) from error
        return self._all[-1]

    def _collect(self) -> None:
        """Frees the extents of dead tensors, after their last transfers."""
        while self.dropped:
            stored, pieces = self.dropped.popleft()
            for slot in [slot for slot in self._slots if slot.key in pieces]:
                slot.wait_changeable()
                self._slots.give(slot)
            self._all.remove(stored)
            stored.free()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        self._monitor.check()
        with self._monitor.guard():
            yield


class QueuedSpill(DiscreteSpill, StoredSpill):
    """StoredSpill beside a discrete device. `streams`: the store's, which are closed after this."""

    def __init__(self, transfers: Transfers, streams: Streams, **sizes: int) -> None:
        DiscreteSpill.__init__(self, streams)
        self.unwanted: deque[Crossing] = deque()  # copies that were asked for ahead and that nobody will load
        StoredSpill.__init__(self, transfers, **sizes)

    def _memory(self) -> tuple[Tensor, Callable[[], None], Callable[[], None]]:
        # Jobs refer to the spill, and the thread does not: without jobs it keeps no spill alive.
        self._worker: Worker[Callable[[], None]] = Worker(
            "zero-offload activations", self._monitor, lambda asked: asked(), enter=self._streams.enter_thread
        )
        memory = self._streams.host(self.host_bytes)
        return memory, self._worker.close, partial(self._streams.give_back, memory)

    def pack(self, tensor: Tensor, what: str) -> Spilled:
        """Asks the thread to write the tensor, whose memory may be reused in stream order."""
        with self._lock, self._guard():
            self._release_unwanted()
            if self.dropped:  # dead activations give their room back first
                self._follow(self._submit(None, tensor, self._write_pieces))
            spilled, values = self._begin(tensor, what)
            self._leave(spilled, self._submit(spilled, values, self._write_pieces))
            return spilled

    def load(self, spilled: OnTier) -> Tensor:
        """The tensor on the device, in stream order. Asks for the one that was packed before it."""
        with self._lock, self._guard():
            self._release_unwanted()
            return self._arrive(spilled)

    def drop(self, spilled: OnTier) -> None:
        """Notes that the tensor's graph died, which may happen on any thread at any time."""
        self.unwanted.extend(spilled.arriving)
        super().drop(spilled)

    def close(self) -> None:
        """Waits for transfers in flight, then frees all memory and extents. Idempotent."""
        with self._lock:
            try:
                super().close()  # waits for the last copy of every slot, so for all copies
            finally:
                self.unwanted.clear()
                self._leaving.clear()

    def _ask(self, spilled: OnTier) -> None:
        values = self._streams.empty(sum(piece.nbytes for piece in spilled.pieces), torch.uint8)
        spilled.arriving.append(self._submit(spilled, values, self._read_pieces))

    def _submit(self, spilled: OnTier | None, values: Tensor, move: Callable[[OnTier, Tensor, Copy], None]) -> Crossing:
        """Asks the thread to move the tensor's bytes to or from `values`. None: only to free what dead tensors had."""
        crossing = Crossing(values, values._version, None)
        self._worker.put(partial(self._carry_out, spilled, crossing, move, self._streams.mark()))
        return crossing

    def _follow(self, crossing: Crossing) -> None:
        """The host waits until the copies are queued. Raises the thread's error if it failed."""
        self._monitor.wait_until(lambda: crossing.copied is not None, "activations")
        super()._follow(crossing)

    def _release_unwanted(self) -> None:
        """Frees, in stream order, the device memory of tensors that were asked for ahead and died."""
        while self.unwanted:
            self._follow(self.unwanted[0])
            self.unwanted.popleft()

    def _carry_out(
        self, spilled: OnTier | None, crossing: Crossing, move: Callable[[OnTier, Tensor, Copy], None], ready: Mark
    ) -> None:
        """Queues the copies of all pieces, after `ready`."""
        self._collect()
        left = 0 if spilled is None else len(spilled.pieces)

        def copy(lane: Lane, into: Tensor, source: Tensor) -> Mark:
            nonlocal left
            mark = self._streams.copy(lane, into, source, (ready,))
            left -= 1
            if not left:
                self._all_queued(crossing, mark)
            return mark

        if spilled is None or not left:
            self._all_queued(crossing, ready)
        else:
            move(spilled, crossing.values, copy)

    def _all_queued(self, crossing: Crossing, last: Mark) -> None:
        with self._monitor.condition:
            crossing.copied = last
            self._monitor.condition.notify_all()


def _part(values: Tensor, piece: _Span) -> Tensor:
    return values[piece.start : piece.start + piece.nbytes]


def _copy(lane: Lane, into: Tensor, source: Tensor) -> None:
    into.copy_(source)


def _give_back(
    stop: Callable[[], None], release: Callable[[], None], slots: Slots[Tensor], stored: list[Stored]
) -> None:
    stop()
    with suppress(OSError):
        slots.drain()
    for each in stored:
        with suppress(Exception):  # its owner may have closed it already
            each.free()
    release()
    slots.clear()
    stored.clear()

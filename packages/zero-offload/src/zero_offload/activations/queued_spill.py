"""Moves tensors of a discrete device to a stored tier, by a thread to which the training thread gives jobs.

Owns that thread, the order of copies and the waits. Not here: slots and pieces (in stored_spill.py).

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

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..memory.transfers import Transfers
from ..monitor import Worker
from ..streams import Lane, Mark, Streams
from .spill import Crossing, DiscreteSpill, Spilled
from .stored_spill import Copy, OnTier, StoredSpill


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

    # -- the training thread ----------------------------------------------------------------------------------------

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

    # -- the thread -------------------------------------------------------------------------------------------------

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

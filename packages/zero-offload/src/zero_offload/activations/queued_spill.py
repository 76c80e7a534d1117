"""Tensors of a discrete device set aside on a stored tier: what the training thread queues, and what carries it out.

Owns that thread, the order of copies and who waits for whom. Slots and pieces are `stored_spill`'s.

[Note: stored, and nobody waits]
    compute stream   forward of 0 | of 1 | of 2            a tensor's memory is used anew after its copies: before 2 is
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
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..monitor import Condition, join, start
from ..streams import Lane, Mark, Streams
from ..transfers import Transfers
from .spill import Crossing, DiscreteSpill, Spilled
from .stored_spill import OnTier, StoredSpill

__all__ = ["QueuedSpill"]

LINGERS_SECONDS = 1.0  # the thread ends when nothing was asked of it for so long: it keeps the spill alive


@dataclass(eq=False)
class _Job(Crossing):
    """Pieces of one tensor, to be copied to or from its bytes on the device, after `ready`."""

    lane: Lane
    spilled: OnTier | None  # None: done, or nothing but to look at what died
    ready: Mark
    queued: int = 0


class _Work:
    """What the thread is asked for, apart from the spill: a thread that has nothing to do must not keep that alive."""

    def __init__(self) -> None:
        self.condition = Condition()
        self.jobs: deque[_Job] = deque()
        self.thread: threading.Thread | None = None
        self.stopped = False

    def stop(self) -> None:
        """Return when the thread has ended. What it was asked for and has not begun is forgotten."""
        with self.condition:
            self.stopped, thread = True, self.thread
            self.jobs.clear()
            self.condition.notify_all()
        join(thread)


class QueuedSpill(DiscreteSpill, StoredSpill):
    """StoredSpill beside a discrete device. `streams`: the store's, which end after this."""

    def __init__(self, transfers: Transfers, streams: Streams, **sizes: int) -> None:
        DiscreteSpill.__init__(self, streams)
        self._work = _Work()
        self.unwanted: deque[Crossing] = deque()  # copies that were asked for ahead and that nobody will load
        StoredSpill.__init__(self, transfers, **sizes)

    def _memory(self) -> tuple[Tensor, Callable[[], None], Callable[[], None]]:
        memory = self._streams.host(self.host_bytes)
        return memory, self._work.stop, partial(self._streams.give_back, memory)

    def pack(self, tensor: Tensor, what: str) -> Spilled:
        """Ask for the tensor to be written; its memory may be used anew in stream order."""
        with self._lock, self._guard():
            self._release_unwanted()
            if self.dropped and not self._unused:  # what died is still to be looked at
                self._follow(self._submit("swap_in", None, tensor))
            spilled, values = self._begin(tensor, what)
            self._leave(spilled, self._submit("swap_out", spilled, values))
            return spilled

    def load(self, spilled: OnTier) -> Tensor:
        """The tensor on the device, in stream order; asks for the one that was packed before it."""
        with self._lock, self._guard():
            self._release_unwanted()
            return self._arrive(spilled)

    def drop(self, spilled: OnTier) -> None:
        """It died: on any thread, at any time, so this is only noted."""
        self.unwanted.extend(spilled.arriving)
        super().drop(spilled)

    def close(self) -> None:
        """Wait for what is in flight and give everything back. Idempotent."""
        with self._lock:
            if not self._open:
                return
            self._work.stop()
            try:
                super().close()  # waits for the last copy of every slot, so for all copies
            finally:
                self.unwanted.clear()
                self._leaving.clear()

    # -- the training thread ----------------------------------------------------------------------------------------

    def _ask(self, spilled: OnTier) -> None:
        nbytes = sum(piece.nbytes for piece in spilled.pieces)
        spilled.arriving.append(self._submit("swap_in", spilled, self._streams.empty(nbytes, torch.uint8)))

    def _submit(self, lane: Lane, spilled: OnTier | None, values: Tensor) -> _Job:
        job, work = _Job(values, values._version, None, lane, spilled, self._streams.mark()), self._work
        with work.condition:
            work.jobs.append(job)
            if work.thread is None:
                work.thread = threading.Thread(target=self._main, name="zero-offload activations", daemon=True)
                start(
                    work.thread,
                    self._fail,
                    "close what offload_activations returned, free threads (ulimit -u), and call offload_activations "
                    "again",
                )
            work.condition.notify_all()
        return job

    def _fail(self, error: BaseException) -> None:
        """Every later call raises it."""
        self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))

    def _follow(self, crossing: Crossing) -> None:
        """The host waits until the copies are queued. Raises what the thread failed with."""
        with self._work.condition:
            self._work.condition.wait_for(lambda: crossing.copied is not None or self._failure is not None)
        if self._failure is not None:
            raise self._failure
        super()._follow(crossing)

    def _release_unwanted(self) -> None:
        """The device memory of what was asked for ahead, and died, is free in stream order after this."""
        while self.unwanted:
            self._follow(self.unwanted[0])
            self.unwanted.popleft()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        self._streams.enter_thread()
        work = self._work
        while True:
            with work.condition:
                if not work.condition.wait_for(lambda: work.jobs or work.stopped, LINGERS_SECONDS) or work.stopped:
                    work.thread = None if not work.stopped else work.thread
                    return
                job = work.jobs.popleft()
            try:
                self._carry_out(job)
            except BaseException as error:
                self._fail(error)
            with work.condition:
                work.condition.notify_all()
            del job  # it keeps what it was asked for from dying

    def _carry_out(self, job: _Job) -> None:
        if self._failure is not None:
            return
        self._collect()
        spilled = job.spilled
        if spilled is None or not spilled.pieces:
            self._all_queued(job, job.ready)
            return

        def copy(lane: Lane, into: Tensor, source: Tensor) -> Mark:
            mark = self._streams.copy(lane, into, source, (job.ready,))
            job.queued += 1
            if job.queued == len(spilled.pieces):
                self._all_queued(job, mark)
            return mark

        if job.lane == "swap_out":
            self._write_pieces(spilled, job.values, copy)
        else:
            self._read_pieces(spilled, job.values, copy)
        job.spilled = None

    def _all_queued(self, job: _Job, last: Mark) -> None:
        with self._work.condition:
            job.copied = last
            self._work.condition.notify_all()

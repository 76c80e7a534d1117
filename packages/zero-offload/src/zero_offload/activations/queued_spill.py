"""Tensors set aside on nvme by a device apart: what the training thread queues, and the thread that carries it out.

Owns that thread, the order of copies and who waits for whom. Slots and pieces are `nvme_spill`'s.

[Note: on nvme, and nobody waits]
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
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..streams import Lane, Mark, Streams
from ..tier import Transfers
from ..tiles.footprint import SPILL_PIECE_BYTES, SPILL_SLOTS
from .host_spill import LEAVING
from .nvme_spill import NvmeSpill, OnNvme
from .spill import ChangedInputError, Spilled

__all__ = ["QueuedSpill"]

LINGERS_SECONDS = 1.0  # the thread ends when nothing was asked of it for so long: it keeps the spill alive


@dataclass(eq=False)
class _Job:
    """Pieces of one tensor, to be copied to or from `values`, its bytes on the device, after `ready`."""

    lane: Lane
    spilled: _Queued | None  # None: done, or nothing but to look at what died
    values: Tensor
    ready: Mark
    version: int = 0
    queued: int = 0
    copied: Mark | None = None  # the last copy, once all are queued


@dataclass(eq=False)
class _Queued(OnNvme):
    """See `Spilled`."""

    arriving: deque[_Job] = field(default_factory=deque)
    changed: bool = False  # in place, while it was still being copied

    def __del__(self) -> None:
        self.spill.unwanted.extend(self.arriving)  # type: ignore[attr-defined]
        super().__del__()


class _Work:
    """What the thread is asked for, apart from the spill: a thread that has nothing to do must not keep that alive."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.jobs: deque[_Job] = deque()
        self.thread: threading.Thread | None = None
        self.stopped = False

    def stop(self) -> None:
        """Return when the thread has ended. What it was asked for and has not begun is forgotten."""
        with self.condition:
            self.stopped, thread = True, self.thread
            self.jobs.clear()
            self.condition.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()


class QueuedSpill(NvmeSpill):
    """NvmeSpill beside a device apart. `streams`: the store's, which end after this."""

    def __init__(
        self, nvme: Transfers, streams: Streams, *, slots: int = SPILL_SLOTS, piece_bytes: int = SPILL_PIECE_BYTES
    ) -> None:
        self._streams = streams
        self._work = _Work()
        self._leaving: deque[tuple[_Job, weakref.ref[_Queued]]] = deque()
        self.unwanted: deque[_Job] = deque()  # copies that were asked for ahead and that nobody will load
        super().__init__(nvme, slots=slots, piece_bytes=piece_bytes)

    def _memory(self) -> tuple[Tensor, Callable[[], None], Callable[[], None]]:
        memory = self._streams.host(self.host_bytes)
        return memory, self._work.stop, partial(self._streams.give_back, memory)

    def pack(self, tensor: Tensor, what: str) -> Spilled:
        """Ask for the tensor to be written; its memory may be used anew in stream order."""
        with self._lock, self._guard():
            self._release_unwanted()
            if self.dropped and not any(self._unused.values()):  # what died is still to be looked at
                self._follow(self._submit(_Job("swap_in", None, tensor, self._streams.mark())))
            spilled, values = self._begin(tensor, what, _Queued)
            job = self._submit(_Job("swap_out", spilled, values, self._streams.mark(), values._version))
            self._leaving.append((job, weakref.ref(spilled)))
            self._let_leave(LEAVING)
            return spilled

    def load(self, spilled: OnNvme) -> Tensor:
        """The tensor on the device, in stream order; asks for the one that was packed before it."""
        assert isinstance(spilled, _Queued)
        with self._lock, self._guard():
            self._release_unwanted()
            self._let_leave()
            if spilled.changed:
                raise ChangedInputError(spilled.what)
            if not spilled.arriving:
                self._ask(spilled)
            job = spilled.arriving.popleft()
            before = spilled.before() if spilled.before is not None else None
            if isinstance(before, _Queued) and not before.arriving:
                self._ask(before)
            self._follow(job)
            return spilled.form.restore(job.values.view(spilled.form.dtype).view(spilled.form.core))

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

    def _ask(self, spilled: _Queued) -> None:
        """The tensor is to come to the device."""
        nbytes = sum(piece.nbytes for piece in spilled.pieces)
        values = self._streams.empty(nbytes, torch.uint8)
        spilled.arriving.append(self._submit(_Job("swap_in", spilled, values, self._streams.mark())))

    def _submit(self, job: _Job) -> _Job:
        work = self._work
        with work.condition:
            work.jobs.append(job)
            if work.thread is None:
                work.thread = threading.Thread(target=self._main, name="zero-offload activations", daemon=True)
                work.thread.start()
            work.condition.notify_all()
        return job

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """For the thread. Raises what it failed with."""
        with self._work.condition:
            self._work.condition.wait_for(lambda: ready() or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def _follow(self, job: _Job) -> None:
        """What the caller queues from here on comes after the job's copies; the host waits until they are queued."""
        self._wait_until(lambda: job.copied is not None)
        assert job.copied is not None
        self._streams.follow(job.copied)

    def _let_leave(self, keep: int = 0) -> None:
        """The oldest go, all but `keep`: their memory may be used anew after their copies."""
        while len(self._leaving) > keep:
            job, packed = self._leaving[0]
            self._follow(job)
            spilled = packed()
            if spilled is not None and job.values._version != job.version:
                spilled.changed = True
            self._leaving.popleft()

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
                self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
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

"""Tensors of a discrete device set aside in host memory, between forward and backward. On the CPU they are there.

Owns the host buffers and the order of copies. How a tensor lies in memory is `spill`'s, what orders copies `streams`'.

[Note: two on their way]
    forward    pack 0 | pack 1 | pack 2 ...     the compute stream goes on; before pack 2 it has followed the copy of 0,
    swap_out          | D2H 0  | D2H 1 ...      so the device holds two that are still leaving
    backward   load 2, begins 1 | load 1, begins 0 | ...
    swap_in    H2D 2 | H2D 1    | H2D 0
A buffer is used again in the order of the lanes; nobody waits on the host. A tensor's buffer is free when the graph
that wanted it dies. One that is too small for the next tensor gets another piece, because to register memory anew would
stop the step. So a buffer is of one piece, and of more after longer batches.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..streams import Mark, Streams
from .spill import Crossing, DiscreteSpill, Form, Packed, Spilled

__all__ = ["HostSpill"]


@dataclass(eq=False)
class _Buffer:
    """Pieces of host memory (uint8), one after another."""

    pieces: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def beside(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The memory for values (uint8) that are no more than its bytes, and the values, part by part."""
        start = 0
        for piece in self.pieces:
            part = values[start : start + piece.numel()]
            if part.numel():
                yield piece[: part.numel()], part
            start += piece.numel()


@dataclass(eq=False)
class _OnHost(Packed):
    """`buffer`: begins with its values as bytes, complete after `copied`."""

    nbytes: int
    buffer: _Buffer
    copied: Mark

    def __del__(self) -> None:
        self.spill.dropped.append((self.buffer, self.copied, self.arriving))  # any thread, any time: only noted


class HostSpill(DiscreteSpill):
    """Copies beside the compute, into host buffers that are used again. `host_bytes`: of all of them."""

    def __init__(self, streams: Streams, *, owned: bool = False) -> None:
        """`owned`: the streams end with it."""
        super().__init__(streams)
        self._owned = owned
        self._unused: list[tuple[_Buffer, Mark]] = []
        self._last: Callable[[], Any] = lambda: None
        self.host_bytes = 0
        self.dropped: deque[tuple[_Buffer, Mark, deque[Crossing]]] = deque()

    def pack(self, tensor: Tensor, what: str) -> Spilled:
        """Begin to copy the tensor; its memory may be used anew in stream order."""
        self._collect()
        form = Form.of(tensor)
        values = form.flatten(tensor)
        buffer, after = self._buffer(values.numel())
        copied = made = self._streams.mark()
        for piece, part in buffer.beside(values):
            copied = self._streams.copy("swap_out", piece, part, (made, *after))
        spilled = _OnHost(self, what, form, self._last, values.numel(), buffer, copied)
        self._last = weakref.ref(spilled)
        self._leave(spilled, Crossing(values, values._version, copied))
        return spilled

    def load(self, spilled: _OnHost) -> Tensor:
        """The tensor on the device, in stream order; begins to bring the one that was packed before it."""
        self._collect()
        return self._arrive(spilled)

    def close(self) -> None:
        """Drop the buffers; whoever owns the streams waits for what is under way. Idempotent."""
        self._collect()
        self._let_leave()
        self._give_back_unused()
        if self._owned:
            self._streams.close()

    def _buffer(self, nbytes: int) -> tuple[_Buffer, tuple[Mark, ...]]:
        """The smallest unused one that is large enough, or the largest one and another piece; with its last copy."""
        self._unused.sort(key=lambda each: each[0].nbytes)
        fits = (place for place, (buffer, _) in enumerate(self._unused) if buffer.nbytes >= nbytes)
        place = next(fits, max(0, len(self._unused) - 1))
        buffer, *after = self._unused[place] if self._unused else (_Buffer([]),)
        if missing := max(0, nbytes - buffer.nbytes):
            buffer.pieces.append(self._streams.host(missing))
            self.host_bytes += missing
        del self._unused[place : place + 1]
        return buffer, tuple(after)

    def _give_back_unused(self) -> None:
        while self._unused:
            buffer, used = self._unused.pop()
            used.wait()
            for piece in buffer.pieces:
                self._streams.give_back(piece)
                self.host_bytes -= piece.numel()

    def _ask(self, spilled: _OnHost) -> None:
        nbytes = spilled.nbytes
        values = self._streams.empty(nbytes, torch.uint8)
        # The caller's stream has followed the copy into the buffer, or it could not use these values.
        arrived = made = self._streams.mark()
        for piece, part in spilled.buffer.beside(values):
            arrived = self._streams.copy("swap_in", part, piece, (made,))
        spilled.arriving.append(Crossing(values, 0, arrived))
        spilled.copied = arrived  # the buffer is free after this, and it is after the copy into it

    def _collect(self) -> None:
        """Take back the buffers of what died."""
        while self.dropped:
            buffer, used, arriving = self.dropped.popleft()
            for crossing in arriving:  # nobody asked for it: its device memory is free in stream order after this
                self._follow(crossing)
            self._unused.append((buffer, used))

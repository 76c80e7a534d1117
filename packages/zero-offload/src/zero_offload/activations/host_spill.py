"""Moves tensors of a discrete device to host memory between forward and backward.

Owns the host buffers and the order of copies. Not here: a tensor's layout in memory (in spill.py), lanes and events
(in streams.py).

[Note: two on their way]
    forward    pack 0 | pack 1 | pack 2 ...     the compute stream goes on; before pack 2 it has followed the copy of 0,
    swap_out          | D2H 0  | D2H 1 ...      so the device holds two that are still leaving
    backward   load 2, begins 1 | load 1, begins 0 | ...
    swap_in    H2D 2 | H2D 1    | H2D 0
A buffer is used again in the order of the lanes; nobody waits on the host. A tensor's buffer is free when the graph
that wanted it dies. A buffer that is too small for the next tensor gets another piece, because replacing it would
register all its memory again, which stops the step. So a buffer has one piece, and more after longer batches.
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


@dataclass(eq=False)
class _Buffer:
    """Pieces of host memory (uint8), one after another."""

    pieces: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def beside(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs (piece of memory, part of `values`) that cover `values`, which are uint8 and fit into the buffer."""
        start = 0
        for piece in self.pieces:
            part = values[start : start + piece.numel()]
            if part.numel():
                yield piece[: part.numel()], part
            start += piece.numel()


@dataclass(eq=False)
class _OnHost(Packed):
    """A tensor in host memory. `buffer`: begins with its values as bytes, complete after `copied`."""

    nbytes: int
    buffer: _Buffer
    copied: Mark

    def __del__(self) -> None:
        self.spill.dropped.append((self.buffer, self.copied, self.arriving))  # any thread, any time: only noted


class HostSpill(DiscreteSpill):
    """Copies beside the compute, into host buffers that are used again. `host_bytes`: bytes of all buffers."""

    def __init__(self, streams: Streams, *, owned: bool = False) -> None:
        """`owned`: `close` closes the streams too."""
        super().__init__(streams)
        self._owned = owned
        self._unused: list[tuple[_Buffer, Mark]] = []
        self._last: Callable[[], Any] = lambda: None
        self.host_bytes = 0
        self.dropped: deque[tuple[_Buffer, Mark, deque[Crossing]]] = deque()

    def pack(self, tensor: Tensor, what: str) -> Spilled:
        """Begins to copy the tensor. Its memory may be reused in stream order."""
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
        """The tensor on the device, in stream order. Begins to copy back the one that was packed before it."""
        self._collect()
        return self._arrive(spilled)

    def close(self) -> None:
        """Drops the buffers. The owner of the streams waits for copies in flight. Idempotent."""
        self._collect()
        self._let_leave()
        self._give_back_unused()
        if self._owned:
            self._streams.close()

    def _buffer(self, nbytes: int) -> tuple[_Buffer, tuple[Mark, ...]]:
        """The smallest unused buffer that is large enough, or the largest with a piece added, and its last copy."""
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
        """Takes back the buffers of tensors whose graph died."""
        while self.dropped:
            buffer, used, arriving = self.dropped.popleft()
            for crossing in arriving:  # read ahead and not loaded: its device memory is free in stream order after this
                self._follow(crossing)
            self._unused.append((buffer, used))

"""Tensors set aside in host memory by a device apart, between forward and backward. On the CPU they are there already.

Owns the host buffers and the order of copies. How a tensor lies in memory is `spill`'s, what orders copies `streams`'.

[Note: two on their way]
    forward    pack 0 | pack 1 | pack 2 ...     the compute stream goes on; before pack 2 it has followed the copy of 0,
    swap_out          | D2H 0  | D2H 1 ...      so the device holds two that are still leaving
    backward   load 2, begins 1 | load 1, begins 0 | ...
    swap_in    H2D 2 | H2D 1    | H2D 0
A buffer is used again in the order of the lanes; nobody waits on the host. A tensor's buffer is free when the graph
that wanted it dies; one that is too small for the next tensor makes room for a larger one.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..streams import Mark, Streams
from .spill import ChangedInputError, Form, Spilled

__all__ = ["HostSpill"]

LEAVING = 2  # tensors whose device memory is kept until their copy was followed


@dataclass(eq=False)
class _OnHost:
    """See `Spilled`. `buffer`: begins with its values as bytes, complete after `copied`."""

    spill: HostSpill
    what: str
    form: Form
    nbytes: int
    buffer: Tensor
    copied: Mark
    before: weakref.ref[_OnHost] | None = field(repr=False)  # packed before this one, so wanted after it
    arriving: deque[tuple[Tensor, Mark]] = field(default_factory=deque)  # device memory that it is copied into
    changed: bool = False  # in place, while it was still being copied

    def load(self) -> Tensor:
        return self.spill.load(self)

    def __del__(self) -> None:
        self.spill.dropped.append((self.buffer, self.copied, self.arriving))  # any thread, any time: only noted


@dataclass(frozen=True)
class _Leaving:
    """A tensor's own memory, until its copy was followed. A change in place would be copied as well, or in part."""

    values: Tensor
    version: int
    copied: Mark
    spilled: weakref.ref[_OnHost]


class HostSpill:
    """Copies beside the compute, into host buffers that are used again. `host_bytes`: of all of them."""

    def __init__(self, streams: Streams, *, owned: bool = False) -> None:
        """`owned`: the streams end with it."""
        self._streams, self._owned = streams, owned
        self._unused: list[tuple[Tensor, Mark]] = []
        self._leaving: deque[_Leaving] = deque()
        self._last: weakref.ref[_OnHost] | None = None
        self.host_bytes = 0
        self.dropped: deque[tuple[Tensor, Mark, deque[tuple[Tensor, Mark]]]] = deque()

    def pack(self, tensor: Tensor, what: str) -> Spilled:
        """Begin to copy the tensor; its memory may be used anew in stream order."""
        self._collect()
        form = Form.of(tensor)
        values = form.flatten(tensor)
        buffer, after = self._buffer(values.numel())
        copied = self._streams.copy("swap_out", buffer[: values.numel()], values, (self._streams.mark(), *after))
        spilled = _OnHost(self, what, form, values.numel(), buffer, copied, self._last)
        self._last = weakref.ref(spilled)
        self._leaving.append(_Leaving(values, values._version, copied, self._last))
        self._let_leave(LEAVING)
        return spilled

    def load(self, spilled: _OnHost) -> Tensor:
        """The tensor on the device, in stream order; begins to bring the one that was packed before it."""
        self._collect()
        self._let_leave()
        if spilled.changed:
            raise ChangedInputError(spilled.what)
        if not spilled.arriving:
            self._begin(spilled)
        values, arrived = spilled.arriving.popleft()
        before = spilled.before() if spilled.before is not None else None
        if before is not None and not before.arriving:
            self._begin(before)
        self._streams.follow(arrived)
        return spilled.form.restore(values.view(spilled.form.dtype).view(spilled.form.core))

    def close(self) -> None:
        """Drop the buffers; whoever owns the streams waits for what is under way. Idempotent."""
        self._collect()
        self._let_leave()
        self._give_back_unused()
        if self._owned:
            self._streams.close()

    def _buffer(self, nbytes: int) -> tuple[Tensor, tuple[Mark, ...]]:
        """The smallest unused one that is large enough, with its last copy; or a new one in the place of all unused."""
        sizes = [(buffer.numel(), place) for place, (buffer, _) in enumerate(self._unused) if buffer.numel() >= nbytes]
        if sizes:
            buffer, used = self._unused.pop(min(sizes)[1])
            return buffer, (used,)
        self._give_back_unused()
        buffer = self._streams.host(nbytes)
        self.host_bytes += nbytes
        return buffer, ()

    def _give_back_unused(self) -> None:
        while self._unused:
            buffer, used = self._unused.pop()
            used.wait()
            self._streams.give_back(buffer)
            self.host_bytes -= buffer.numel()

    def _begin(self, spilled: _OnHost) -> None:
        nbytes = spilled.nbytes
        values = self._streams.empty(nbytes, torch.uint8)
        # The caller's stream has followed the copy into the buffer, or it could not use these values.
        arrived = self._streams.copy("swap_in", values, spilled.buffer[:nbytes], (self._streams.mark(),))
        spilled.arriving.append((values, arrived))
        spilled.copied = arrived  # the buffer is free after this, and it is after the copy into it

    def _let_leave(self, keep: int = 0) -> None:
        """The oldest go, all but `keep`: what the caller queues from here on comes after their copies."""
        while len(self._leaving) > keep:
            oldest = self._leaving.popleft()
            spilled = oldest.spilled()
            if spilled is not None and oldest.values._version != oldest.version:
                spilled.changed = True
            self._streams.follow(oldest.copied)

    def _collect(self) -> None:
        """Take back the buffers of what died."""
        while self.dropped:
            buffer, used, arriving = self.dropped.popleft()
            for _, arrived in arriving:  # nobody asked for it: its device memory is free in stream order after this
                self._streams.follow(arrived)
            self._unused.append((buffer, used))

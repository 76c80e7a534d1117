"""Sets tensors aside between forward and backward: where they are, or a discrete device's in host memory.

Owns `Spill`, `Spilled`, `Form`, the host buffers, and the order in which tensors leave a discrete device and come back.
Not here: other destinations (in stored_spill.py), which tensors, and when (in
checkpointed_forward.py), lanes and events (in streams.py).

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
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import OffloadError
from ..streams import Mark, Streams

LEAVING = 2  # tensors whose device memory is kept until their copy was followed


def keep(module: str, *, unit: bool = True) -> str:
    """The advice to keep a module's activations. unit: the module is a unit, of this name."""
    others = "".join(module.rpartition(".")[:2]) + "*"
    policy = f" (policy={{{module!r}: 'keep', {others!r}: 'recompute'}})" if unit else ""
    return f"give the unit with {module} the policy 'keep'{policy}"


class ActivationError(OffloadError, ValueError):
    """A policy that does not exist or that a unit cannot follow. Also raised for wrong `rows` and `tokens`."""


class ChangedInputError(OffloadError, RuntimeError):
    """A tensor that is still needed was changed in place. head: it is the input of logits that are computed later."""

    def __init__(self, unit: str, *, head: bool = False) -> None:
        super().__init__(
            f"an input of module {unit} was changed in place after the module's forward, so backward cannot repeat "
            f"that forward: change a copy of the input. Or {'leave rows= out' if head else keep(unit, unit=False)}"
        )


class Spilled(Protocol):
    """A tensor that was set aside."""

    def load(self) -> Tensor:
        """A tensor of the same values, shape, strides and device. May be called more than once."""


@dataclass(frozen=True)
class Form:
    """A tensor's layout in memory. `core`: its sizes with expanded dimensions (stride 0) taken as 1."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    core: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        core = tuple(1 if step == 0 else count for count, step in zip(size, stride, strict=True))
        return cls(size, stride, core, tensor.dtype, tensor.device)

    def flatten(self, tensor: Tensor) -> Tensor:
        """The values once each, as bytes (uint8) in row-major order. Copies only if their layout is another one."""
        for dimension, (count, whole) in enumerate(zip(self.core, self.size, strict=True)):
            if count != whole:
                tensor = tensor.narrow(dimension, 0, 1)
        return tensor.detach().contiguous().view(-1).view(torch.uint8)

    def restore(self, values: Tensor) -> Tensor:
        """The tensor, from contiguous values of shape `core`."""
        if self.core == self.size and values.stride() == self.stride and values.device == self.device:
            return values
        base = torch.empty_strided(self.core, self.stride, dtype=self.dtype, device=self.device)
        return base.copy_(values).expand(self.size)


class Spill:
    """Sets tensors aside. This one moves nothing: the tensor stays where it is, alive."""

    host_bytes = 0  # of its slots or buffers

    def pack(self, tensor: Tensor, what: str) -> Spilled:
        return _Alive(tensor, what)

    def close(self) -> None:
        """Frees memory and extents."""


STAYS = Spill()


class _Alive:
    def __init__(self, tensor: Tensor, what: str) -> None:
        self._tensor, self._what, self._version = tensor.detach(), what, tensor._version

    def load(self) -> Tensor:
        if self._tensor._version != self._version:
            raise ChangedInputError(self._what)
        return self._tensor.detach()


@dataclass(eq=False)
class Crossing:
    """A tensor's bytes on the device, while they are copied from there or to there."""

    values: Tensor
    version: int  # of the values when the copy was asked for
    copied: Any  # the mark of the last copy, once all are queued


@dataclass(eq=False)
class Packed:
    """A `Spilled` that was moved. `before()`: the tensor packed before it, wanted next in backward; None: it died."""

    spill: Any
    what: str
    form: Form
    before: Callable[[], Any] = field(repr=False)
    arriving: deque[Any] = field(default_factory=deque, init=False)  # `Crossing` to a discrete device
    changed: bool = field(default=False, init=False)  # in place, while it was still being copied

    def load(self) -> Tensor:
        values: Tensor = self.spill.load(self)
        return values


class DiscreteSpill(Spill):
    """Lets tensors leave a discrete device, and come back, in stream order. Subclasses choose the destination."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._leaving: deque[tuple[Crossing, weakref.ref[Packed]]] = deque()

    def _ask(self, spilled: Any) -> None:
        """Begins to bring the tensor's bytes back, which are `arriving` from here on."""
        raise NotImplementedError

    def _leave(self, spilled: Packed, crossing: Crossing) -> None:
        self._leaving.append((crossing, weakref.ref(spilled)))
        self._let_leave(LEAVING)

    def _let_leave(self, keep: int = 0) -> None:
        """Lets go of all tensors except the `keep` newest: their memory may be reused after their copies.

        A change in place before that may be in the copy, or a part of it: the tensor is then marked as `changed`.
        """
        while len(self._leaving) > keep:
            crossing, packed = self._leaving[0]
            self._follow(crossing)
            spilled = packed()
            if spilled is not None and crossing.values._version != crossing.version:
                spilled.changed = True
            self._leaving.popleft()

    def _arrive(self, spilled: Packed) -> Tensor:
        """The tensor on the device, in stream order. Begins to bring back the one that was packed before it."""
        self._let_leave()
        if spilled.changed:
            raise ChangedInputError(spilled.what)
        if not spilled.arriving:
            self._ask(spilled)
        crossing = spilled.arriving.popleft()
        before = spilled.before()
        if before is not None and not before.arriving:
            self._ask(before)
        self._follow(crossing)
        return spilled.form.restore(crossing.values.view(spilled.form.dtype).view(spilled.form.core))

    def _follow(self, crossing: Crossing) -> None:
        """Makes the caller's stream wait for the copies."""
        self._streams.follow(crossing.copied)


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
        while self._unused:
            buffer, used = self._unused.pop()
            used.wait()
            for piece in buffer.pieces:
                self._streams.give_back(piece)
                self.host_bytes -= piece.numel()
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

"""Defines the base for setting tensors aside between forward and backward, which keeps them, and their layout.

Owns `Spill`, `Spilled`, `Form`, and the order in which tensors leave a discrete device and come back. Not here: their
destinations (in host_spill.py, stored_spill.py and queued_spill.py), which tensors, and when (in
checkpointed_forward.py).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import OffloadError
from ..streams import Mark, Streams

LEAVING = 2  # tensors whose device memory is kept until their copy was followed


class ActivationError(OffloadError, ValueError):
    """A policy that does not exist or that a unit cannot follow. Also raised for wrong `rows` and `tokens`."""


class ChangedInputError(OffloadError, RuntimeError):
    """A tensor that is still needed was changed in place. head: it is the input of logits that are computed later."""

    def __init__(self, unit: str, *, head: bool = False) -> None:
        super().__init__(
            f"an input of unit {unit} was changed in place after its forward, so it cannot be computed on again; make "
            "that operation out of place, or, if plain torch allows it, "
            f"{'leave rows= out' if head else 'keep its activations'}"
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

    def empty(self) -> Tensor:
        """Contiguous memory for the values, on the CPU."""
        return torch.empty(self.core, dtype=self.dtype)

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
    copied: Mark | None  # the last copy, once all are queued


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
        assert crossing.copied is not None
        self._streams.follow(crossing.copied)

"""Bytes of tensors that a store of bytes keeps for a while, and that come back into the same tensors.

Owns the extent and the transfers, a few at a time. Whose tensors they are, and what becomes of their memory meanwhile,
is the caller's.

[Note: two stages]
A part on a discrete device passes through pinned memory, so that its copy and the keeper's transfer of another part are
under way at the same time. The host waits for the copy of a part only when later ones have been begun.

    write    copy 0 | copy 1 | copy 2, write 0 | copy 3, write 1 | ...
    read     read 0 | read 1 | read 2, copy 0  | read 3, copy 1  | ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from .device import queued
from .layout import round_up

__all__ = ["HostMemory", "Keeper", "SavedBytes", "give_memory", "take_memory"]

PART_BYTES = 16 << 20
PARTS = 4  # under way at a time; from a device each has a buffer of pinned memory


class Keeper(Protocol):
    """The part of `zero_offload.ByteStore` that is needed here: `zero_nvme.Slab` has it, for one."""

    alignment: int

    def allocate(self, nbytes: int) -> Any: ...

    def free(self, extent: Any) -> None: ...

    def read(self, extent: Any, buffer: Any, offset: int = 0) -> Any:
        """Begin to fill `buffer`. Returns something with a `wait()`, which raises the error of a read that failed."""

    def write(self, extent: Any, buffer: Any, offset: int = 0) -> Any: ...


class HostMemory:
    """A `Keeper` in host memory, for what lies on a discrete device."""

    alignment = 64

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def free(self, extent: Tensor) -> None:
        extent.untyped_storage().resize_(0)

    def read(self, extent: Tensor, buffer: Tensor, offset: int = 0) -> HostMemory:
        buffer.copy_(extent[offset : offset + buffer.numel()])
        return self

    def write(self, extent: Tensor, buffer: Tensor, offset: int = 0) -> HostMemory:
        extent[offset : offset + buffer.numel()].copy_(buffer)
        return self

    def wait(self) -> None:
        """It is done."""


class SavedBytes:
    """Tensors' bytes in one extent of a `Keeper`. One thread at a time."""

    def __init__(self) -> None:
        self._keeper: Keeper | None = None
        self._extent: Any = None
        self.nbytes = 0

    def put(self, keeper: Keeper, tensors: Sequence[Tensor]) -> None:
        """Write contiguous tensors, on any device. Raises what the keeper raises, and keeps nothing then."""
        sizes = [round_up(tensor.nbytes, keeper.alignment) for tensor in tensors]
        if not sum(sizes):
            return
        extent = keeper.allocate(sum(sizes))
        try:
            with torch.no_grad():
                _move(keeper, extent, tensors, write=True)
        except BaseException:
            keeper.free(extent)
            raise
        self._keeper, self._extent, self.nbytes = keeper, extent, sum(sizes)

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Read the bytes into tensors like those that were put, in the same order. They are kept until `free`."""
        if self._keeper is not None:
            with torch.no_grad():
                _move(self._keeper, self._extent, tensors, write=False)

    def free(self) -> None:
        """Forget the bytes. Idempotent."""
        keeper, extent, self._keeper, self._extent, self.nbytes = self._keeper, self._extent, None, None, 0
        if keeper is not None:
            with suppress(Exception):  # its owner may have closed it already
                keeper.free(extent)


def give_memory(tensors: Iterable[Tensor]) -> None:
    """Free the memory under tensors that are whole storages; they and all views of them stay."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def take_memory(tensors: Iterable[Tensor]) -> None:
    """Give them memory again, whose contents are undefined."""
    for tensor in tensors:
        if not tensor.untyped_storage().nbytes():
            tensor.untyped_storage().resize_(tensor.nbytes)


def _parts(tensors: Sequence[Tensor], alignment: int) -> Iterator[tuple[int, Tensor]]:
    """(offset in the extent, uint8) of each part."""
    first = 0
    for tensor in tensors:
        data = tensor.detach().view(-1).view(torch.uint8)
        for start in range(0, data.numel(), PART_BYTES):
            yield first + start, data[start : start + PART_BYTES]
        first += round_up(tensor.nbytes, alignment)


class _Moving:
    """A part that is being moved. `pinned`: what it passes through, of PART_BYTES; None: it lies in host memory."""

    def __init__(
        self, keeper: Keeper, extent: Any, offset: int, part: Tensor, pinned: Tensor | None, *, write: bool
    ) -> None:
        self._keeper, self._extent, self._offset, self._write = keeper, extent, offset, write
        self._part, self.pinned = part, pinned
        self._buffer = part if pinned is None else pinned[: part.numel()]
        self._halfway = pinned is None
        self._wait = self._reach_keeper() if self._halfway or not write else self._copy()

    def go_on(self) -> None:
        """Wait for the first of two stages, and begin the second."""
        if not self._halfway:
            self._wait()
            self._halfway = True
            self._wait = self._reach_keeper() if self._write else self._copy()

    def end(self) -> None:
        self.go_on()
        self._wait()

    def abandon(self) -> None:
        """Return when nothing of it is under way any more."""
        with suppress(Exception):
            self._wait()

    def _reach_keeper(self) -> Callable[[], Any]:
        """Begin the keeper's part. What waits for it."""
        begin = self._keeper.write if self._write else self._keeper.read
        wait: Callable[[], Any] = begin(self._extent, self._buffer, self._offset).wait
        return wait

    def _copy(self) -> Callable[[], Any]:
        into, source = (self._buffer, self._part) if self._write else (self._part, self._buffer)
        into.copy_(source, non_blocking=True)
        return queued(self._part.device)


def _move(keeper: Keeper, extent: Any, tensors: Sequence[Tensor], *, write: bool) -> None:
    """Return when everything is written, or read. When it raises, nothing is under way any more."""
    moving: deque[_Moving] = deque()
    spare: list[Tensor] = []  # pinned buffers that nothing uses

    def end_one() -> None:
        moving[0].end()
        ended = moving.popleft()
        if ended.pinned is not None:
            spare.append(ended.pinned)

    try:
        for offset, part in _parts(tensors, keeper.alignment):
            if len(moving) == PARTS:
                end_one()
            pinned = None
            if part.device.type != "cpu":
                pinned = spare.pop() if spare else torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=True)
            moving.append(_Moving(keeper, extent, offset, part, pinned, write=write))
            for earlier in list(moving)[: -PARTS // 2]:
                earlier.go_on()
        while moving:
            end_one()
    finally:
        for left in moving:
            left.abandon()

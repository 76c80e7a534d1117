"""Defines the protocols that other packages fill: bytes kept somewhere (`ByteStore`), arithmetic (`UpdateStep`).

Owns the records of both. Native packages satisfy the protocols structurally and are never imported here.
`memory_store.MemoryByteStore` and `torch_step.TorchStep` are the slow references. `testing` ships the suites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from .core import Segment


class Ticket(Protocol):
    """Handle of a submitted request. Any thread may call its methods, any number of times."""

    def done(self) -> bool:
        """Whether the request is over, with or without an error. Never blocks."""

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the request is complete. Raises its error; TimeoutError after `timeout` seconds."""


class Extent(Protocol):
    """A range of bytes that a ByteStore has allocated."""

    @property
    def offset_bytes(self) -> int:
        """Where the extent begins in the store, a multiple of its alignment."""

    @property
    def nbytes(self) -> int:
        """Its length, at least the bytes asked for."""


@runtime_checkable
class ByteStore(Protocol):
    """Bytes in a file, on a device, in memory. Every method may be called from several threads.

    A buffer is a contiguous CPU tensor or an object with the buffer protocol; it must live, unchanged, until its ticket
    is done. Requests in flight are not ordered: to read bytes just written, wait for the write's ticket first.
    """

    alignment: int  # bytes: extents begin at its multiples; transfers whose parts are multiples of it need no bounce

    def reserve(self, total_bytes: int) -> None:
        """Makes sure of `total_bytes` in all. Raises early (ENOSPC) with path, bytes wanted and bytes free."""

    def allocate(self, nbytes: int) -> Extent:
        """An extent of at least `nbytes`, aligned."""

    def free(self, extent: Any) -> None:
        """Gives an extent back."""

    def read(self, extent: Any, buffer: Any, offset: int = 0) -> Ticket:
        """Begins to fill `buffer` from bytes [offset, offset + len(buffer)) of the extent."""

    def write(self, extent: Any, buffer: Any, offset: int = 0) -> Ticket:
        """Begins to store `buffer` as bytes [offset, offset + len(buffer)) of the extent."""

    def close(self) -> None:
        """Frees everything. Idempotent."""


@runtime_checkable
class NamedByteStore(ByteStore, Protocol):
    """A ByteStore whose bytes stay when it is closed, and can be found again."""

    name: str | None  # None: they do not stay
    found: bool  # whether an earlier process left bytes under this name

    def claim(self, offset_bytes: int, nbytes: int) -> Extent:
        """The extent that an earlier process had there. Raises an error if it is taken, and OSError (ENODATA) if there
        are no such bytes."""

    def sync(self) -> None:
        """Makes every complete write survive a power cut. Once it has failed, it raises on every call."""

    def remove(self) -> None:
        """Closes the store and deletes its bytes."""


@dataclass(frozen=True)
class Field:
    """One array of a tile's state."""

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class TileView:
    """A tile's memory, for an `UpdateStep`.

    states: by the names of its fields, (field.numel,) field.dtype. parameter: (numel,) parameter dtype. gradient:
    (numel,) fp32, bf16 or fp16; (0,) where a tile is initialised, read or written. uncut: the segment of the parameter
    that is this tile, if the optimizer needs it whole.
    """

    states: Mapping[str, Tensor]
    parameter: Tensor
    gradient: Tensor
    uncut: Segment | None = None


@dataclass(frozen=True)
class UpdateSegment:
    """Elements [start, stop) of a tile which share their options and their step number.

    They belong to one parameter of `shape` (None: not known), and begin with element `offset` of it, flattened.
    options: the parameter group's, such as lr and betas. step: the number of this step of its parameter, from 1.
    """

    start: int
    stop: int
    options: Mapping[str, Any]
    step: int
    shape: tuple[int, ...] | None = None
    offset: int = 0


@runtime_checkable
class UpdateStep(Protocol):
    """An optimizer's arithmetic on tiles. Native code releases the GIL.

    Several threads call it: one `update`, while another may `accumulate` and take `chunk_norms_squared`, and a third
    may `read` other tiles. Tiles and ranks hold parts of parameters, so an element's update depends on that element
    alone: `zero_offload.testing.UpdateStepSuite` compares a tile in one segment and in two.
    """

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Reads type and options. Raises TypeError for an unknown type, ValueError for an unsupported option."""

    def layout(self, numel: int, parameter_dtype: torch.dtype) -> Sequence[Field]:
        """The state fields of a tile of `numel` elements. With fp32 parameters the parameter is the master."""

    def state_names(self) -> tuple[str, ...]:
        """Logical names besides "master": ("exp_avg", "exp_avg_sq")."""

    def initialise(self, tile: TileView, master: Tensor) -> None:
        """Writes the tile's parameter (rounded) and states from its fp32 master (numel,)."""

    def update(self, tile: TileView, segments: Sequence[UpdateSegment], scale: float) -> None:
        """One step with gradient × scale. Elements outside the segments keep their bits."""

    def read(self, tile: TileView, name: str) -> Tensor:
        """Logical fp32 values (numel,) of "master" or a state name."""

    def write(self, tile: TileView, name: str, values: Tensor) -> None:
        """The inverse of `read`."""

    def accumulate(self, into: Tensor, values: Tensor) -> None:
        """into (fp32) += values (any float dtype)."""

    def chunk_norms_squared(self, values: Tensor) -> Sequence[float]:
        """The sum of squares of each chunk of 1 << 20 elements, in double. Not finite in: not finite out."""


class Started(Protocol):
    """An update, a transfer or a copy under way. Any thread may ask, as often as it likes."""

    def done(self) -> bool:
        """Whether wait() would return at once. Never blocks."""

    def wait(self) -> None:
        """Returns when it has ended. Raises the error of one that failed, each time."""


ENDED: Started = cast(Any, SimpleNamespace(done=lambda: True, wait=lambda: None))
"""What `start` may return of an update that it has made itself."""


@runtime_checkable
class StartingStep(UpdateStep, Protocol):
    """An `UpdateStep` with threads of its own: several tiles may be under way, updated one after another."""

    @property
    def in_a_row(self) -> bool:
        """Whether it should: its threads have cores of their own, which would be idle between two tiles."""

    def start(self, tile: TileView, segments: Sequence[UpdateSegment], scale: float) -> Started:
        """As `update`, but returns at once. Updates run in the order of their starts. Nobody else touches the tile."""

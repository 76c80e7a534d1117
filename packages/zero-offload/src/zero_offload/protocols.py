"""What this package asks of others: bytes kept somewhere (`ByteStore`) and optimizer arithmetic (`UpdateStep`).

Owns the records that both speak in, and two questions about a step. Native packages satisfy these structurally and are
never imported here; `memory_store.MemoryByteStore` and `torch_step.TorchStep` are the slow references, `testing` ships
the suites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from zero_core.store import Segment

__all__ = [
    "ENDED",
    "ByteStore",
    "Extent",
    "Field",
    "NamedByteStore",
    "RunsUncut",
    "SegmentStep",
    "Started",
    "StartingStep",
    "StateTile",
    "Ticket",
    "TileView",
    "UpdateSegment",
    "UpdateStep",
    "flop_of",
    "names_of",
    "shapes_of",
]


class Ticket(Protocol):
    """Handle of a submitted request. Any thread may ask, as often as it likes."""

    def done(self) -> bool:
        """Whether the request is over, with or without an error. Never blocks."""

    def wait(self, timeout: float | None = None) -> None:
        """Return when the request is complete. Raises its error; TimeoutError after `timeout` seconds."""


class Extent(Protocol):
    """A range that a ByteStore gave out."""

    @property
    def offset_bytes(self) -> int:
        """Where the extent begins in the store, a multiple of its alignment."""

    @property
    def nbytes(self) -> int:
        """Its length, at least what was asked for."""


@runtime_checkable
class ByteStore(Protocol):
    """Bytes in a file, on a device, in memory. Every method may be called from several threads.

    A buffer is a contiguous CPU tensor or an object with the buffer protocol; it must live, unchanged, until its ticket
    is done. Requests in flight are not ordered: whoever reads what it writes waits between.
    """

    alignment: int  # bytes: extents begin at its multiples; transfers whose parts are multiples of it need no bounce

    def reserve(self, total_bytes: int) -> None:
        """Make sure of `total_bytes` in all. Raises early (ENOSPC) with path, bytes wanted and bytes free."""

    def allocate(self, nbytes: int) -> Extent:
        """An extent of at least `nbytes`, aligned."""

    def free(self, extent: Any) -> None:
        """Give an extent back."""

    def read(self, extent: Any, buffer: Any, offset: int = 0) -> Ticket:
        """Fill `buffer` from bytes [offset, offset + len(buffer)) of the extent."""

    def write(self, extent: Any, buffer: Any, offset: int = 0) -> Ticket:
        """Store `buffer` as bytes [offset, offset + len(buffer)) of the extent."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


@runtime_checkable
class NamedByteStore(ByteStore, Protocol):
    """A ByteStore whose bytes stay when it is closed, and can be found again."""

    name: str | None  # None: they do not stay
    found: bool  # whether an earlier process left bytes under this name

    def claim(self, offset_bytes: int, nbytes: int) -> Extent:
        """The extent that an earlier process had there. Raises an error where it is taken, and OSError (ENODATA) where
        there are no such bytes."""

    def sync(self) -> None:
        """Every write that is complete survives a power cut after this. Once it has failed it raises each time."""

    def remove(self) -> None:
        """Close it, and delete its bytes."""


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


class StateTile(Protocol):
    """A tile without its gradient: what is initialised, read and written."""

    @property
    def states(self) -> Mapping[str, Tensor]:
        """By field name: (field.numel,) field.dtype."""

    @property
    def parameter(self) -> Tensor:
        """(numel,) parameter dtype."""


class TileView(StateTile, Protocol):
    """A tile ready for its update."""

    @property
    def gradient(self) -> Tensor:
        """(numel,) fp32, bf16 or fp16."""


class UpdateSegment(Protocol):
    """Elements [start, stop) of a tile which share their options and their step number.

    They are of one parameter of `shape` (None: not known), and begin with element `offset` of it, flattened.
    """

    @property
    def start(self) -> int:
        """Its first element in the tile."""

    @property
    def stop(self) -> int:
        """The element of the tile after its last one."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the parameter group: lr, betas and so on."""

    @property
    def step(self) -> int:
        """The number of this step of its parameter, from 1."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its parameter, or None if it is not known."""

    @property
    def offset(self) -> int:
        """The element of the flattened parameter with which it begins."""


@dataclass(frozen=True)
class SegmentStep:
    """The `UpdateSegment` that this package hands out: tile-relative, `options` of the group, `step` from 1."""

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
        """Read type and options. TypeError names a type it does not know, ValueError an option it cannot do."""

    def layout(self, numel: int, parameter_dtype: torch.dtype) -> Sequence[Field]:
        """The state fields of a tile of `numel` elements. With fp32 parameters the parameter is the master."""

    def state_names(self) -> tuple[str, ...]:
        """Logical names besides "master": ("exp_avg", "exp_avg_sq")."""

    def initialise(self, tile: StateTile, master: Tensor) -> None:
        """Write the tile's parameter (rounded) and states from its fp32 master (numel,)."""

    def update(self, tile: TileView, segments: Sequence[UpdateSegment], scale: float) -> None:
        """One step with gradient × scale. Elements outside the segments keep their bits."""

    def read(self, tile: StateTile, name: str) -> Tensor:
        """Logical fp32 values (numel,) of "master" or a state name."""

    def write(self, tile: StateTile, name: str, values: Tensor) -> None:
        """The inverse of `read`."""

    def accumulate(self, into: Tensor, values: Tensor) -> None:
        """into (fp32) += values (any float dtype)."""

    def chunk_norms_squared(self, values: Tensor) -> Sequence[float]:
        """The sum of squares of each chunk of 1 << 20 elements, in double. Not finite in: not finite out."""


@runtime_checkable
class RunsUncut(UpdateStep, Protocol):
    """An `UpdateStep` that also runs parameters which the optimizer needs whole: `zero_core.store.Segment.uncut`.

    Each is a tile of its own, whose `uncut` is the segment; that of any other tile is None. `update` gets one segment
    then, and what lies behind it in the tile is padding. Where the compute device is a discrete one, such a tile is not
    started: `update` gets it, with all of its tensors there, on a stream of their own which is the current one, and
    also while tiles that were started are under way. In `initialise`, `read` and `write` they are the tier's.
    """

    def uncut_layout(self, segment: Segment, numel: int, parameter_dtype: torch.dtype) -> Sequence[Field]:
        """The state fields of such a tile of `numel` elements. They may be of any size."""

    def names_of(self, segment: Segment) -> Sequence[str]:
        """Which of `state_names` are kept of a segment, uncut or not."""

    def state_shapes(self, group: int, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the states of an uncut parameter of `shape` in this group that have not its shape.

        Each is a field of its name, and of that many elements; `read` and `write` have these. `state_names` has none.
        """

    def uncut_group(self, parameter: Tensor) -> int | None:
        """The number of the group of a parameter that the optimizer needs whole; None of any other."""

    def scratch_bytes(self, group: int, shape: tuple[int, ...]) -> int:
        """What an update of an uncut parameter of `shape` in this group takes beside the tile while it runs, of host
        memory or of a discrete device's."""


def names_of(step: UpdateStep, segment: Segment) -> tuple[str, ...]:
    """Names of the states that the step keeps of this segment, with a value an element."""
    return tuple(step.names_of(segment)) if isinstance(step, RunsUncut) else tuple(step.state_names())


def shapes_of(step: UpdateStep, segment: Segment) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of those that have not the parameter's."""
    if not (segment.uncut and isinstance(step, RunsUncut)) or segment.group is None:
        return {}
    return step.state_shapes(segment.group, segment.uncut_shape)


def flop_of(step: UpdateStep, segment: Segment) -> tuple[int, torch.dtype]:
    """FLOP of the matrix products of an update of this segment, and their format. A step that runs uncut parameters
    may say so by a method `update_flop(group, shape)`, for predictions; of one that does not, none are known."""
    told = getattr(step, "update_flop", None)
    if told is None or not segment.uncut or segment.group is None:
        return 0, torch.float32
    flop: tuple[int, torch.dtype] = told(segment.group, segment.uncut_shape)
    return flop


class Started(Protocol):
    """An update under way."""

    def done(self) -> bool:
        """Whether it has ended. Never blocks."""

    def wait(self) -> None:
        """Return when it has."""


class _Ended:
    """As Started."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


ENDED: Started = _Ended()
"""What `start` may return of an update that it has made itself."""


@runtime_checkable
class StartingStep(UpdateStep, Protocol):
    """An `UpdateStep` with threads of its own: several tiles may be under way, updated one after another."""

    @property
    def in_a_row(self) -> bool:
        """Whether it should: its threads have cores of their own, which would be idle between two tiles."""

    def start(self, tile: TileView, segments: Sequence[UpdateSegment], scale: float) -> Started:
        """As `update`, but return at once; updates run in the order of their starts. Nobody else touches the tile."""

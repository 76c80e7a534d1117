"""Shard arithmetic. Integers only: no tensors, no collectives.

[Note: the flat storage of a unit]
A unit's parameters lie one after another in one flat buffer of one dtype. Each slot begins at a multiple of 128 bytes,
and the total is padded so that every shard, too, begins at one:

    | slot 0 ...pad| slot 1 pad| slot 2 ........ pad| tail pad |
    |<----- shard 0 ---->|<----- shard 1 ----->|<-- shard 2 -->|

Slots do not depend on the number of shards; only the tail does. A slot that is `uncut`, and the one behind it, begin at
multiples of a page, so that a store can move them apart from each other.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

__all__ = ["ALIGNMENT_BYTES", "UNCUT_BYTES", "Box", "Piece", "Rows", "Slot", "UnitLayout", "boxes", "round_up"]

ALIGNMENT_BYTES = 128
UNCUT_BYTES = 4096


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Rows:
    """Of the parameter `name` of this shape, its rows [start, stop) along dimension 0: one flat range of it."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def flat_start(self) -> int:
        """The first element of the range."""
        return self.start * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in its unit's flat storage. `numel` and `offset` are in elements, padding apart.

    `rows`: it is no whole parameter, but these rows of one that is cut.
    `uncut`: the optimizer needs all of the parameter at once.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    offset: int
    rows: Rows | None = None
    uncut: bool = False

    @property
    def stop(self) -> int:
        return self.offset + self.numel

    @property
    def whole(self) -> Rows:
        """The parameter that it belongs to, and which rows of it it is."""
        return self.rows or Rows(self.name, self.shape, 0, self.shape[0] if self.shape else 1)


@dataclass(frozen=True)
class Piece:
    """The part [slot_start, slot_stop) of one slot, which begins at element `shard_start` of a shard.

    `k`: the number of the slot in its unit.
    """

    slot: Slot
    k: int
    slot_start: int
    slot_stop: int
    shard_start: int

    @property
    def numel(self) -> int:
        """Elements in the piece."""
        return self.slot_stop - self.slot_start

    @property
    def shard_stop(self) -> int:
        """The element of the shard after its last one."""
        return self.shard_start + self.numel


@dataclass(frozen=True)
class UnitLayout:
    """The slots of one unit, and how its padded total is cut into equal shards.

    Examples:
        >>> from zero_core.layout import UnitLayout
        >>> layout = UnitLayout.build("block", [("weight", (6, 8)), ("bias", (6,))], itemsize=4, shard_count=2)
        >>> layout.numel, layout.shard_numel
        (128, 64)
        >>> [(piece.slot.name, piece.numel) for piece in layout.pieces(0)]
        [('weight', 48)]
        >>> [(piece.slot.name, piece.numel) for piece in layout.pieces(1)]
        [('bias', 6)]
    """

    name: str
    slots: tuple[Slot, ...]
    numel: int
    shard_count: int
    _pieces: dict[int, tuple[Piece, ...]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls,
        name: str,
        parameters: Iterable[tuple[str, Sequence[int]]],
        *,
        itemsize: int,
        shard_count: int,
        rows: Mapping[str, Rows] = MappingProxyType({}),
        uncut: Container[str] = (),
    ) -> UnitLayout:
        """Lay out parameters (name, shape) of one dtype of `itemsize` bytes, in their order. rows: of those that are
        rows of others, by name. uncut: names of those that the optimizer needs whole."""
        if shard_count < 1 or ALIGNMENT_BYTES % itemsize:
            raise ValueError(f"shard_count={shard_count} must be at least 1, itemsize={itemsize} divide 128")
        quantum = ALIGNMENT_BYTES // itemsize
        slots: list[Slot] = []
        offset = 0
        for parameter, shape in parameters:
            numel, stays = math.prod(shape), parameter in uncut
            if stays or (slots and slots[-1].uncut):
                offset = round_up(offset, UNCUT_BYTES // itemsize)
            slots.append(Slot(parameter, tuple(shape), numel, offset, rows.get(parameter), stays))
            offset += round_up(numel, quantum)
        return cls(name, tuple(slots), round_up(offset, quantum * shard_count), shard_count)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included."""
        return self.numel // self.shard_count

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the flat storage that shard `rank` holds."""
        if not 0 <= rank < self.shard_count:
            raise ValueError(f"rank {rank} of {self.shard_count} shards of unit {self.name}")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The parts of parameters which shard `rank` holds, in storage order. Empty parts are left out."""
        if rank not in self._pieces:
            start, stop = self.shard_range(rank)
            found = []
            for k, slot in enumerate(self.slots):
                low, high = max(start, slot.offset), min(stop, slot.stop)
                if low < high:
                    found.append(Piece(slot, k, low - slot.offset, high - slot.offset, low - start))
            self._pieces[rank] = tuple(found)
        return self._pieces[rank]

    def piece(self, rank: int, k: int) -> Piece | None:
        """The part of slot k which shard `rank` holds; None: it holds none of it."""
        return next((piece for piece in self.pieces(rank) if piece.k == k), None)


@dataclass(frozen=True)
class Box:
    """An n-dimensional box of a tensor; its elements, row-major, begin at flat element `start` of the tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Cut the contiguous range [start, stop) of a row-major tensor into boxes, in order.

    At most 1 box in one dimension, 3 in two, 2n-1 in n. Each box is itself contiguous in the tensor.
    """
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"range [{start}, {stop}) of a tensor of {total} elements, shape {tuple(shape)}")
    if start == stop:
        return ()
    if not shape:
        return (Box((), (), 0),)
    row = total // shape[0]
    first, last = start // row, (stop - 1) // row
    if start == first * row and stop == (last + 1) * row:
        sizes = (last + 1 - first, *shape[1:])
        return (Box((first, *(0 for _ in shape[1:])), sizes, start),)
    if first == last:
        inner = boxes(shape[1:], start - first * row, stop - first * row)
        return tuple(Box((first, *b.offsets), (1, *b.sizes), b.start + first * row) for b in inner)
    edges = (start, round_up(start, row), stop // row * row, stop)  # part of a row, whole rows, part of a row
    return tuple(box for low, high in pairwise(edges) for box in boxes(shape, low, high))

"""Computes the layout of units and shards. Integers only: no tensors, no collectives.

[Note: the flat storage of a unit]
A unit's parameters follow one another in one flat buffer of one dtype. Each slot begins at a multiple of 128 bytes,
and the total is padded so that every shard, too, begins at one:

    | slot 0 ...pad| slot 1 pad| slot 2 ........ pad| tail pad |
    |<----- shard 0 ---->|<----- shard 1 ----->|<-- shard 2 -->|

Slots do not depend on the number of shards; only the tail does. A slot that is `uncut`, and the one behind it, begin at
multiples of a page, so that a store can move each of them separately.

[Note: owners]
On several shards, one of them holds all of an uncut slot: its rank is the slot's owner. So the shards of such a unit
have different sizes, and slots are in the order of their owners:

    | slots of rank 0 | slot of rank 2 | rank 1 owns nothing: a page of padding |

`owners` balances them over all units of a model. In a unit with uncut slots the other slots have owners too, unless
they have more elements than the uncut ones. Then one rank owns the uncut slots, and the rest is cut to fill the shards:

    | uncut slots of rank 1, and part of the rest | rest: rank 2 | rest: rank 0 |

A unit without uncut slots is cut into equal shards, and so is everything on one shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

ALIGNMENT_BYTES = 128
UNCUT_BYTES = 4096


def round_up(value: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) along dimension 0 of the parameter `name`, which has this shape: one flat range of it."""

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
    """The place of one parameter in its unit's flat storage. `numel` and `offset` are in elements, without padding.

    `rows`: it is not a whole parameter, but these rows of one that is cut.
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
        """The unit's first element after the slot's last one."""
        return self.offset + self.numel

    @property
    def whole(self) -> Rows:
        """The parameter that it belongs to, and its rows there."""
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
        """The shard's first element after the piece's last one."""
        return self.shard_start + self.numel


@dataclass(frozen=True)
class UnitLayout:
    """The slots of one unit, and how its padded total is cut into shards: equal ones, except in [Note: owners].

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
    ranges: tuple[tuple[int, int], ...] | None = None  # of each shard, in elements; None: they are equal
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
        owners: Sequence[int | None] | None = None,
    ) -> UnitLayout:
        """Lays out parameters (name, shape) of one dtype of `itemsize` bytes, in their order.

        rows: by name, of those that are rows of others. uncut: names of those that the optimizer needs whole. owners:
        each one's owner or None, as the function `owners` returns them for this unit; slots are then in their order.
        """
        if shard_count < 1 or ALIGNMENT_BYTES % itemsize:
            raise ValueError(f"shard_count={shard_count} must be at least 1, itemsize={itemsize} divide 128")
        quantum, page = ALIGNMENT_BYTES // itemsize, UNCUT_BYTES // itemsize
        found = list(parameters)
        slots: dict[int, Slot] = {}

        def lay(numbers: Iterable[int], offset: int) -> int:
            """Lays out the parameters of these numbers from `offset` on. Returns where the last one's padding ends."""
            behind_uncut = False
            for k in numbers:
                (parameter, shape), numel = found[k], math.prod(found[k][1])
                if parameter in uncut or behind_uncut:
                    offset = round_up(offset, page)
                behind_uncut = parameter in uncut
                slots[k] = Slot(parameter, tuple(shape), numel, offset, rows.get(parameter), behind_uncut)
                offset += round_up(numel, quantum)
            return offset

        if owners is None or shard_count == 1:
            end, ranges = round_up(lay(range(len(found)), 0), quantum * shard_count), None
        else:
            end, ranges = _owned(owners, lay, page, quantum, shard_count)
        return cls(name, tuple(slots[k] for k in range(len(found))), end, shard_count, ranges)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included; of the longest one, where they are not equal."""
        if self.ranges is None:
            return self.numel // self.shard_count
        return max(stop - start for start, stop in self.ranges)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the flat storage that shard `rank` holds."""
        if not 0 <= rank < self.shard_count:
            raise ValueError(f"unit {self.name} has {self.shard_count} shards, from 0 on, and none of number {rank}")
        if self.ranges is not None:
            return self.ranges[rank]
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def numel_of(self, rank: int) -> int:
        """Elements of shard `rank`, padding included."""
        start, stop = self.shard_range(rank)
        return stop - start

    @property
    def numels(self) -> tuple[int, ...] | None:
        """Elements of each shard. None: they are equal."""
        return None if self.ranges is None else tuple(stop - start for start, stop in self.ranges)

    def rows(self, whole: Any) -> list[Any] | None:
        """Cuts `whole`, (numel,), into the parts of the shards. None: the shards are equal."""
        return None if self.ranges is None else [whole[start:stop] for start, stop in self.ranges]

    def owner(self, k: int) -> int | None:
        """Returns the shard that holds all of slot k, in a unit with owners; else None. See [Note: owners]."""
        slot = self.slots[k]
        ranges = enumerate(self.ranges or ())
        return next((rank for rank, (start, stop) in ranges if start <= slot.offset < slot.stop <= stop), None)

    def in_order(self) -> list[tuple[int, Slot]]:
        """Returns (number, slot) in storage order."""
        return sorted(enumerate(self.slots), key=lambda each: each[1].offset)

    def edges(self) -> list[int]:
        """Returns for each slot, by its number, where its padding ends: at the next one, or at the end of the unit."""
        order = self.in_order()
        found = [0] * len(order)
        for (k, _), stop in zip(order, [*(slot.offset for _, slot in order[1:]), self.numel], strict=True):
            found[k] = stop
        return found

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Returns the parts of parameters that shard `rank` holds, in storage order. Empty parts are left out."""
        if rank not in self._pieces:
            start, stop = self.shard_range(rank)
            found = []
            for k, slot in self.in_order():
                low, high = max(start, slot.offset), min(stop, slot.stop)
                if low < high:
                    found.append(Piece(slot, k, low - slot.offset, high - slot.offset, low - start))
            self._pieces[rank] = tuple(found)
        return self._pieces[rank]

    def piece(self, rank: int, k: int) -> Piece | None:
        """Returns the part of slot k that shard `rank` holds, or None."""
        return next((piece for piece in self.pieces(rank) if piece.k == k), None)


def owners(units: Iterable[Sequence[tuple[int, bool]]], shard_count: int) -> list[tuple[int | None, ...] | None]:
    """Returns for each unit the owner of each of its slots; None: the slot is cut. See [Note: owners].

    units: for each, (elements, uncut) of its slots. Returns None for a unit that is cut into equal shards. The longest
    slots come first, each to the rank with the fewest elements of all units so far; equal ones in the order of the
    units. So every rank, and a planner, finds the same owners.
    """
    found: list[list[int | None] | None] = []
    together: list[tuple[int, int, list[int]]] = []  # elements, unit and slots that go to one rank
    rests: dict[int, int] = {}  # elements that are cut, by the units that have uncut slots beside them
    for i, slots in enumerate(units):
        whole = [k for k, (_, uncut) in enumerate(slots) if uncut]
        uncut_numel = sum(slots[k][0] for k in whole)
        rest = sum(numel for numel, _ in slots) - uncut_numel
        found.append([None] * len(slots) if whole and shard_count > 1 else None)
        if found[-1] is not None and rest > uncut_numel:
            rests[i] = rest
            together.append((uncut_numel, i, whole))
        elif found[-1] is not None:
            together += [(numel, i, [k]) for k, (numel, _) in enumerate(slots)]
    loads = [0] * shard_count
    for numel, i, numbers in sorted(together, key=lambda each: -each[0]):
        owner = min(range(shard_count), key=loads.__getitem__)
        of_unit: Any = found[i]
        for k in numbers:
            of_unit[k] = owner
        if i in rests:
            others = min(rests[i] // (shard_count - 1), (numel + rests[i]) // shard_count)
            loads = [load + others for load in loads]
            loads[owner] += rests[i] - others * shard_count
        loads[owner] += numel
    return [None if each is None else tuple(each) for each in found]


def _owned(
    owned: Sequence[int | None], lay: Callable[[Iterable[int], int], int], page: int, quantum: int, shard_count: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Lays out slots that have owners. Returns the elements of all, and the range of each shard."""
    cut = [k for k, owner in enumerate(owned) if owner is None]
    own = {rank: [k for k, owner in enumerate(owned) if owner == rank] for rank in range(shard_count)}
    order = sorted(own, key=lambda rank: (not own[rank], rank))  # padding in front of a slot would belong to no rank
    ends = [0]
    if cut:
        order = [(order[0] + step) % shard_count for step in range(shard_count)]
        whole = round_up(lay(own[order[0]], 0), page)
        pages = -(-lay(cut, whole) // page)
        mine, share = whole // page, -(-pages // shard_count)
        if mine >= share:
            share = -(-(pages - mine) // (shard_count - 1))
        mine = max(mine, share)
        ends += [(mine + step * share) * page for step in range(shard_count)]
    else:
        for rank in order:
            ends.append(max(round_up(lay(own[rank], ends[-1]), page), ends[-1] + page))
    ends[-1] = round_up(ends[-1], quantum * shard_count)  # so that each machine's ranks can cut it evenly
    ranges = dict(zip(order, pairwise(ends), strict=True))
    return ends[-1], tuple(ranges[rank] for rank in range(shard_count))


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
    """Cuts the contiguous range [start, stop) of a row-major tensor into boxes, in order.

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

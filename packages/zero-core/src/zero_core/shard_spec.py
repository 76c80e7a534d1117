"""Describes one unit's shard to a store (`ShardSpec`): its segments, each of one parameter, and where it may be cut."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

CHUNK_NUMEL = 1 << 20  # elements whose squares are summed together in double, whoever computes the norm
Initial = Callable[[int], torch.Tensor]  # the first values of shard i, as `ShardStore.attach` asks for them


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a shard which belong to ONE parameter, `name`.

    `group` is the index of the parameter's optimizer group; None: frozen, and there is no state. Padding is in none.
    `shape`: of the parameter; None: not known. `offset`: the element of the flattened parameter with which the segment
    begins: `layout.boxes(shape, offset, offset + stop - start)` are the rows that it holds.
    `uncut`: it is all of the parameter, or of some of its rows, because the optimizer needs that. A store cuts it
    nowhere. `look`: the class and the attributes of the parameter, for an optimizer that steps it whole. `position`:
    the parameter's among those of its group.
    """

    start: int
    stop: int
    group: int | None
    name: str
    shape: tuple[int, ...] | None = None
    offset: int = 0
    uncut: bool = False
    look: tuple[type[Any], dict[str, Any]] | None = field(default=None, compare=False, repr=False)
    position: int = field(default=0, compare=False, repr=False)

    @property
    def uncut_shape(self) -> tuple[int, ...]:
        """The shape of an uncut segment: that of the parameter, or of its rows here."""
        held = self.stop - self.start
        shape = (held,) if self.shape is None else self.shape
        numel = math.prod(shape[1:])
        return (held // numel, *shape[1:]) if shape and numel else shape


@dataclass(frozen=True)
class ShardSpec:
    """One unit's shard on this rank: `numel` elements of `dtype`: fp32, bf16 or fp16 if it is `trained`.

    `encloses`: it is the model's own unit, in use from the first unit's turn to the last's.
    `trained`: if not, it is bytes of any dtype: no gradient arrives and no segment has a group. Its only state is
    "master", which is the shard itself: `initial`, `read_state` and `write_state` have it in `dtype`, not in fp32.
    `beside`: the same number for all units that the same modules open at once; None: it is opened alone.
    `depth`: how many units are in use around it, without the model's own: 1 inside a block. It comes after these.
    `numels`: the elements of every rank's shard of the unit, where they are not equal.
    """

    name: str
    numel: int
    dtype: torch.dtype
    segments: tuple[Segment, ...]
    encloses: bool = False
    trained: bool = True
    beside: int | None = None
    depth: int = 0
    numels: tuple[int, ...] | None = None

    def unit_numel(self, shard_count: int) -> int:
        """Elements of the whole unit, padding included."""
        return self.numel * shard_count if self.numels is None else sum(self.numels)

    @property
    def master_dtype(self) -> torch.dtype:
        """Of the state "master"."""
        return torch.float32 if self.trained else self.dtype


def stretches(spec: ShardSpec) -> tuple[tuple[int, int, Segment | None], ...]:
    """The shard's elements as (start, stop, segment), in order: each uncut segment, with the padding behind it, and the
    elements between two of them (None). Without any uncut segment all of the shard is one stretch."""
    found: list[tuple[int, int, Segment | None]] = []
    begins = 0
    for k, segment in enumerate(spec.segments):
        if segment.uncut:
            last = k + 1 == len(spec.segments)
            stop = spec.numel if last else spec.segments[k + 1].start
            if begins < segment.start:
                found.append((begins, segment.start, None))
            found.append((segment.start, stop, segment))
            begins = stop
    if begins < spec.numel:
        found.append((begins, spec.numel, None))
    return tuple(found)

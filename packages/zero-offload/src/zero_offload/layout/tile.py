"""Cuts shards into tiles, gives each a tier, and lays out its optimizer states. Integers and views, no transfers.

[Note: a tile]
A shard is cut into tiles of `tile_numel` elements, a multiple of the norm's chunk; the last tile of a shard is short.
A tile is the atom of placement, transfer and update. Its optimizer state is one record, so that an update costs one
read and one write; the fields begin at multiples of 128 bytes:

    | remainder int16 | exp_avg fp32 | exp_avg_sq fp32 | ...to the alignment |

The parameter itself is part of its shard, not of the record: forward and backward read it without the states.

A parameter that the optimizer needs whole is one tile, with the padding behind it. Only the elements between two such
parameters are cut every `tile_numel` elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ..core import CHUNK_NUMEL, GroupStep, Segment, ShardSpec, round_up, stretches
from ..errors import PlacementError
from ..memory.arena import Block
from ..protocols import Field, UpdateSegment, UpdateStep
from ..tier import TIERS, Tier
from ..uncut_step import UncutStep

FIELD_ALIGNMENT = 128
Placement = str | Mapping[str, float]


def check_tile_numel(tile_numel: int) -> None:
    """Raises PlacementError unless the norm's chunks nest in tiles."""
    if tile_numel <= 0 or tile_numel % CHUNK_NUMEL:
        raise PlacementError(
            f"tile_numel={tile_numel} must be a positive multiple of {CHUNK_NUMEL} elements; "
            f"use {max(1, round(tile_numel / CHUNK_NUMEL)) * CHUNK_NUMEL}"
        )


@dataclass(frozen=True)
class Record:
    """The byte offset of each field of a tile's states in its record of `nbytes`."""

    fields: tuple[Field, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def views(self, block: Block, start_bytes: int = 0) -> dict[str, Tensor]:
        """The fields of a record that begins `start_bytes` into the block."""
        return {
            item.name: block.view(item.dtype, item.numel, start_bytes + offset)
            for item, offset in zip(self.fields, self.offsets, strict=True)
        }


@dataclass(frozen=True)
class Tile:
    """Elements [start, stop) of unit `unit`'s shard. `trainable`: whether any element has a state. `uncut`: the
    parameter that it is, if the optimizer needs that whole. `visits`: a discrete device updates it, wherever it is
    kept."""

    unit: int
    index: int  # within the shard
    start: int
    stop: int
    trainable: bool
    name: str = field(compare=False)
    uncut: Segment | None = field(default=None, compare=False)
    visits: bool = field(default=False, compare=False)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"tile {self.index} of unit {self.name}"


def cut(
    unit: int, spec: ShardSpec, tile_numel: int, *, discrete: bool = False, update_share: float = 0.0
) -> tuple[Tile, ...]:
    """The tiles of a shard; none for an empty one. A discrete device updates uncut tiles, and `update_share` of the
    others, spread evenly: of any n of these from the first on, `update_share * n` are in it, rounded."""
    tiles: list[Tile] = []
    others = 0  # tiles so far that are not uncut
    for first, last, uncut in stretches(spec):
        for start in range(first, last, tile_numel if uncut is None else last - first):
            stop = last if uncut is not None else min(start + tile_numel, last)
            trainable = any(s.group is not None and s.start < stop and s.stop > start for s in spec.segments)
            chosen = int((others + 1) * update_share + 0.5) > int(others * update_share + 0.5)
            visits = discrete and (uncut is not None or chosen)
            others += uncut is None
            tiles.append(Tile(unit, len(tiles), start, stop, trainable, spec.name, uncut, visits))
    return tuple(tiles)


def segment_steps(
    tile: Tile, segments: Sequence[Segment], steps: Sequence[int], groups: Sequence[GroupStep]
) -> tuple[UpdateSegment, ...]:
    """The parts of `segments` inside the tile that this update moves, tile-relative. Step 0 and frozen are left out."""
    found = []
    for segment, step in zip(segments, steps, strict=True):
        if segment.group is None or step == 0:
            continue
        start, stop = max(segment.start, tile.start), min(segment.stop, tile.stop)
        if start < stop:
            options, offset = groups[segment.group].options, segment.offset + start - segment.start
            found.append(UpdateSegment(start - tile.start, stop - tile.start, options, step, segment.shape, offset))
    return tuple(found)


def record_of(step: UpdateStep, numel: int, dtype: torch.dtype, alignment: int, uncut: Segment | None = None) -> Record:
    """The record of a tile of `numel` elements."""
    if uncut is None:
        fields = step.layout(numel, dtype)
    else:
        assert isinstance(step, UncutStep), f"{type(step).__name__} cannot run {uncut.name} uncut"
        fields = step.uncut_layout(uncut, numel, dtype)
    sizes = (item.nbytes for item in fields)
    ends = list(accumulate(sizes, lambda end, nbytes: round_up(end + nbytes, FIELD_ALIGNMENT), initial=0))
    return Record(tuple(fields), tuple(ends[:-1]), round_up(ends[-1], alignment))


# -- placements: a tier, or fractions of tiers -------------------------------------------------------------------------


def check_update_share(share: object) -> None:
    """Raises PlacementError unless `share` is a number from 0 to 1."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise PlacementError(
            f"update_share={share!r} is not a number from 0 to 1: it is the part of the tiles with states outside of "
            "the device that the device updates. Leave it out for 0"
        )


def shares(placement: Placement, kind: str, tiers: Sequence[Tier] = TIERS) -> dict[Tier, float]:
    """The fraction on each of `tiers`, in their order, which is fast to slow.

    Raises PlacementError naming `kind`, the value, and values that would do.
    """
    known = ", ".join(f'"{tier}"' for tier in tiers)
    if isinstance(placement, str):
        placement = {placement: 1.0}
    if not isinstance(placement, Mapping) or not placement:
        raise PlacementError(f'{kind}={placement!r} is no tier ({known}) or fractions {{"host": 0.4, "nvme": 0.6}}')
    found = dict.fromkeys(tiers, 0.0)
    for name, share in placement.items():
        tier = Tier(name)
        if tier not in found:
            raise PlacementError(f"{kind}: {name!r} is not a tier; known: {known}")
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not math.isfinite(share) or share < 0:
            raise PlacementError(f'{kind}: the fraction of "{tier}" is {share!r}, and must be a number from 0 to 1')
        found[tier] = float(share)
    if not math.isclose(sum(found.values()), 1.0, abs_tol=1e-6):
        raise PlacementError(f"{kind}: {dict(placement)} adds up to {sum(found.values()):g}; make the sum 1")
    return found


def place(placement: Placement, sizes: Sequence[int], kind: str, tiers: Sequence[Tier] = TIERS) -> tuple[Tier, ...]:
    """The tier of each tile, given the tiles' sizes in their order: the first tiles are in the fastest of `tiers`.

    A tile's middle decides its tier, so that 0.37 of equal tiles is the first 37 % of them, to half a tile.

    Examples:
        >>> import zero_offload
        >>> zero_offload.place({"host": 0.25, "nvme": 0.75}, [100] * 4, "optimizer")
        ('host', 'nvme', 'nvme', 'nvme')
    """
    fractions = shares(placement, kind, tiers)
    total, found, before = sum(sizes), [], 0
    for size in sizes:
        found.append(tier_at((before + size / 2) / total if total else 0.0, fractions))
        before += size
    return tuple(found)


def tier_at(middle: float, fractions: Mapping[Tier, float]) -> Tier:
    """The tier of a tile whose middle is at the fraction `middle` of all elements."""
    bounds = zip(fractions, accumulate(fractions.values()), strict=True)
    return next(tier for tier, bound in bounds if middle < bound or math.isclose(bound, 1.0, abs_tol=1e-6))


def device_share(placement: Placement) -> float:
    """The fraction on the device."""
    return placement.get(Tier.DEVICE, 0.0) if isinstance(placement, Mapping) else float(placement == Tier.DEVICE)


def check_device_shares(parameters: Placement, gradients: Placement, optimizer: Placement) -> None:
    """Raises PlacementError unless units whose states are on a discrete device have everything else there too."""
    states = device_share(optimizer)
    if not math.isclose(device_share(gradients), states, abs_tol=1e-6):
        raise PlacementError(
            f"gradients={gradients!r} and optimizer={optimizer!r}: with the model on a GPU, gradients and optimizer "
            f'states need the same fraction on "device"; set gradients={optimizer!r}'
        )
    if device_share(parameters) < states - 1e-6:
        raise PlacementError(
            f"parameters={parameters!r} and optimizer={optimizer!r}: optimizer states on a GPU need their parameters "
            f"there too; set parameters={optimizer!r}"
        )

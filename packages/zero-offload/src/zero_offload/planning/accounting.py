"""Bytes: what each tier holds of each kind, and what a step moves. Integers only: no budgets, no seconds, no choice.

All figures are one rank's. Tiles, records and tiers are those of `footprint`, which `TieredStore` builds from, and a
test holds the sums equal to its own; but units that are alike are counted together, since a model of a trillion
parameters has ten thousands of them and the planner tries many placements.

[Note: What a step moves on nvme]
    optimizer    the record of every trained tile is read once and written once
    parameters   read for each forward and each backward (stage 3), trained tiles written once by the update. Units that
                 are still in a slot are not read again, so the reads are an upper bound
    gradients    the first that arrives in a step writes the reduce dtype, each later one reads what is there and writes
                 fp32; the update reads the last form
    setup        writes parameters and records once
Extents are rounded up to the store's alignment, so what is moved is a multiple of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import torch

from zero_core.store import lent_bytes

from ..arena import PAGE_BYTES, Arena
from ..errors import PlacementError
from ..placement import Placement, shares
from ..protocols import Field
from ..tier import TIERS, Tier
from ..tiles.footprint import (
    GRADIENT_BYTES,
    KINDS,
    MINIMUM_SLOTS,
    StorePlan,
    UnitPlan,
    _apart,
    _slots,
    _unit_slots,
    gradient_itemsize,
)
from ..tiles.tile import Record, check_tile_numel, cut, record_of, round_up
from .sizes import ModelSizes

__all__ = [
    "KINDS",
    "STATE_KINDS",
    "TIERS",
    "Account",
    "AdamLayout",
    "Cut",
    "Placed",
    "Shape",
    "account",
    "update_bytes",
]

STATE_KINDS = KINDS[:3]


class AdamLayout:
    """The layout of Adam in fp32: what a plan counts with where no `UpdateStep` is at hand. It cannot update."""

    def layout(self, numel: int, parameter_dtype: torch.dtype) -> Sequence[Field]:
        """Three fp32 values an element; two where the parameters are fp32 and so are their own master."""
        names = ("exp_avg", "exp_avg_sq") if parameter_dtype == torch.float32 else ("master", "exp_avg", "exp_avg_sq")
        return [Field(name, torch.float32, numel) for name in names]

    def state_names(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shape:
    """How the states are cut and typed: everything that turns elements into bytes."""

    parameter_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.bfloat16
    shard_count: int = 1
    tile_numel: int = 1 << 22
    alignment: int = 4096  # bytes, of an extent on nvme
    accumulate: int = 1  # micro-batches a step
    stage: int = 3
    replicas: int = 1  # ranks that hold the same shard
    no_sync: bool = False  # gradients of all micro-batches but the last wait on their rank
    prefetch_bytes: int = 0
    resident_bytes: int = 0
    step: Any = field(default_factory=AdamLayout)  # an UpdateStep, or as much of one as AdamLayout is
    apart: bool = False  # the device tier is not host memory

    def state_bytes(self, numel: int) -> int:
        """Bytes of optimizer state of `numel` elements."""
        return sum(item.nbytes for item in self.step.layout(numel, self.parameter_dtype))

    @property
    def ranks(self) -> int:
        return self.shard_count * self.replicas

    @property
    def arriving(self) -> int:
        """Gradients of a unit that reach the store in a step: one where they are added up on their rank before."""
        return 1 if self.ranks > 1 and (self.no_sync or self.stage == 1) else self.accumulate

    @property
    def gradient_itemsize(self) -> int:
        """Bytes that are kept of an element of a gradient by the store."""
        return gradient_itemsize(self.reduce_dtype, self.arriving)

    @property
    def device_state_itemsize(self) -> int:
        """Bytes of optimizer state of an element that a device apart updates: fp32, and a master where it needs one."""
        return GRADIENT_BYTES * (len(self.step.state_names()) + (self.parameter_dtype != torch.float32))


@dataclass(frozen=True)
class UnitRun:
    """`count` units in a row which are alike, from shard element `start` of all shards on. The first one's plan."""

    unit: UnitPlan
    count: int
    start: int = 0


@dataclass(frozen=True)
class Placed:
    """Every unit with its tiers, and the slots between them. `slots` has no units of its own: they are in `runs`."""

    runs: tuple[UnitRun, ...]
    slots: StorePlan
    own_slot_bytes: int  # of units so small that each has a slot of its own

    @property
    def below(self) -> bool:
        """Whether any tile of any kind is not on the device: then there is a store, and units have their own memory."""
        kinds = ((u.parameter_tiers, u.gradient_tiers, u.state_tiers) for u in (run.unit for run in self.runs))
        return any(tier != Tier.DEVICE for tiers in kinds for kind in tiers for tier in kind)

    @property
    def buffer_bytes(self) -> int:
        return self.slots.buffer_bytes + self.own_slot_bytes

    @property
    def arena_bytes(self) -> int:
        """As `StorePlan.arena_bytes`, which needs every unit by itself."""
        return self.buffer_bytes + sum(run.count * self.slots.unit_bytes(run.unit) for run in self.runs)


class Cut:
    """A model's shards on one rank, cut into tiles, units that are alike together. Built once, placed many times."""

    def __init__(self, sizes: ModelSizes, shape: Shape, rank: int = 0) -> None:
        check_tile_numel(shape.tile_numel)
        self.shape = shape
        alignment = max(shape.alignment, PAGE_BYTES)
        records: dict[int, Record] = {}
        self.runs: list[UnitRun] = []
        start, previous = 0, None
        for unit in sizes.units:
            alike = (unit.encloses, *((parameter.numel, parameter.trained) for parameter in unit.parameters))
            if alike == previous:
                last = self.runs[-1]
                self.runs[-1] = replace(last, count=last.count + 1)
                start += last.unit.spec.numel
                continue
            previous = alike
            # Rank 0's shard is never smaller than another's: padding is at the end.
            spec = unit.shard(shape.parameter_dtype, shape.shard_count, rank)
            tiles = cut(len(self.runs), spec, shape.tile_numel)
            for tile in tiles:
                if tile.numel not in records:
                    records[tile.numel] = record_of(shape.step, tile.numel, shape.parameter_dtype, alignment)
            own = tuple(records[t.numel] if t.trainable and records[t.numel].nbytes else None for t in tiles)
            nowhere = (Tier.HOST,) * len(tiles)
            self.runs.append(UnitRun(UnitPlan(spec, tiles, own, nowhere, nowhere, nowhere), 1, start))
            start += spec.numel
        self.numel = start

    def place(self, placements: Mapping[str, Placement], slots: int | None) -> Placed:
        """As `footprint.plan_store`, in time that does not grow with the number of units that are alike."""
        fractions = [shares(placements[kind], kind) for kind in STATE_KINDS]
        edges = {b * self.numel for kind in fractions for b in accumulate(kind.values()) if 0 < b < 1}
        runs = []
        for run in self.runs:
            for first, count in _pieces(run, edges):
                start = run.start + first * run.unit.spec.numel
                tiers = [
                    tuple(_tier_at((start + t.start + t.numel / 2) / self.numel, kind) for t in run.unit.tiles)
                    for kind in fractions
                ]
                apart, records = self.shape.apart, run.unit.records
                if apart:  # what a device updates itself has no record of the step's
                    records = tuple(None if s == Tier.DEVICE else r for r, s in zip(records, tiers[2], strict=True))
                plan = UnitPlan(run.unit.spec, run.unit.tiles, records, tiers[0], tiers[1], tiers[2], apart)
                runs.append(UnitRun(plan, count, start))
        return Placed(tuple(runs), *self._buffers(runs, slots))

    def _buffers(self, runs: Sequence[UnitRun], wanted: int | None) -> tuple[StorePlan, int]:
        if wanted is not None and wanted < MINIMUM_SLOTS:
            raise PlacementError(f"slots={wanted}: at least {MINIMUM_SLOTS} (a read, an update and a write at a time)")
        shape, alignment = self.shape, max(self.shape.alignment, PAGE_BYTES)
        states, gradients = list[int](), list[int]()
        units: list[_Sized] = []
        for run in runs:
            unit = run.unit
            for tile, record, g, s in zip(unit.tiles, unit.records, unit.gradient_tiers, unit.state_tiers, strict=True):
                if record is not None and s == Tier.NVME:
                    states += [record.nbytes] * run.count
                if tile.trainable and g == Tier.NVME:
                    gradients += [round_up(tile.numel * shape.gradient_itemsize, alignment)] * run.count
            units += [_Sized(unit.parameter_bytes, unit.streamed)] * run.count
        whole = (unit.parameter_bytes * shape.shard_count for unit in units)
        lent = lent_bytes(whole, shape.prefetch_bytes, shape.resident_bytes, shape.shard_count)
        own, shared = _unit_slots(cast(Sequence[UnitPlan], units), lent // shape.shard_count)
        apart = _apart([run.unit for run in runs], shape.reduce_dtype, shape.step) if shape.apart else {}
        apart["own_landings"] = ()  # of units, which are not here; budgets counts them
        plan = StorePlan(
            units=(),
            tile_numel=shape.tile_numel,
            alignment=alignment,
            state_slots=_slots(states, wanted),
            state_slot_bytes=max(states, default=0),
            gradient_slots=_slots(gradients, wanted),
            gradient_slot_bytes=max(gradients, default=0),
            unit_slots=shared,
            unit_slot_bytes=round_up(max((u.parameter_bytes for u in units if u.streamed), default=0), alignment),
            own_slots=(),
            gradient_itemsize=shape.gradient_itemsize,
            **apart,
        )
        return plan, sum(Arena.rounded(round_up(units[i].parameter_bytes, alignment)) for i in own)


class _Sized(NamedTuple):
    """As much of a `UnitPlan` as slots are counted from."""

    parameter_bytes: int
    streamed: bool


def _pieces(run: UnitRun, edges: Iterable[float]) -> Iterator[tuple[int, int]]:
    """(first, count) of parts of the run in which no placement changes but in a part of one unit."""
    numel, ends = run.unit.spec.numel, {0, run.count}
    for edge in edges:
        at = int((edge - run.start) // numel) if numel else 0
        ends |= {end for end in range(at - 1, at + 3) if 0 < end < run.count}
    ordered = sorted(ends)
    for first, stop in pairwise(ordered):
        yield first, stop - first


def _tier_at(middle: float, fractions: Mapping[Tier, float]) -> Tier:
    """The rule of `placement.place` for a tile whose middle lies at the fraction `middle` of all elements."""
    bound = 0.0
    for tier in TIERS:
        bound += fractions[tier]
        if middle < bound or math.isclose(bound, 1.0, abs_tol=1e-6):
            return tier
    return Tier.NVME


@dataclass(frozen=True)
class Account:
    """Bytes of one rank. `held[tier, kind]`; `moved` on nvme by purpose; `updated`: memory traffic of the update."""

    held: Mapping[tuple[str, str], int]
    moved: Mapping[str, int]
    updated: Mapping[str, int]  # by where the update runs: device or host
    setup_write_bytes: int

    @property
    def read_bytes(self) -> int:
        return sum(n for purpose, n in self.moved.items() if purpose.endswith("_read"))

    @property
    def write_bytes(self) -> int:
        return sum(n for purpose, n in self.moved.items() if purpose.endswith("_write"))

    def held_on(self, tier: str) -> int:
        return sum(nbytes for (where, _), nbytes in self.held.items() if where == tier)


def account(placed: Placed, shape: Shape) -> Account:
    """Add up what lies where, and what a step moves of it."""
    held: Counter[tuple[str, str]] = Counter()
    updated: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    size, align = shape.parameter_dtype.itemsize, placed.slots.alignment
    for run in placed.runs:
        unit, count = run.unit, run.count
        if unit.whole_numel:
            held["device", "optimizer"] += count * unit.whole_numel * shape.device_state_itemsize
            updated["device"] += count * device_update_bytes(shape, unit.whole_numel)
        above = unit.memory_numel(unit.parameter_tiers) + unit.device_numel(unit.parameter_tiers)
        behind = unit.parameter_bytes - above * size
        moved["extents"] += count * round_up(behind, align)
        rows = zip(unit.tiles, unit.records, unit.parameter_tiers, unit.gradient_tiers, unit.state_tiers, strict=True)
        for tile, record, parameter, gradient, state in rows:
            held[parameter.value, "parameters"] += count * tile.numel * size
            if parameter == Tier.NVME and tile.trainable:
                moved["parameters"] += count * round_up(tile.numel * size, align)
            if unit.trainable and (gradient != Tier.NVME or tile.trainable):
                held[gradient.value, "gradients"] += count * tile.numel * shape.gradient_itemsize
            if gradient == Tier.NVME and tile.trainable:
                moved["reduced"] += count * round_up(tile.numel * shape.reduce_dtype.itemsize, align)
                moved["wide"] += count * round_up(tile.numel * GRADIENT_BYTES, align)
            if record is not None:
                held[state.value, "optimizer"] += count * record.nbytes
                updated["device" if state == Tier.DEVICE else "host"] += count * update_bytes(shape, tile.numel)
    optimizer = held["nvme", "optimizer"]
    traffic = {
        "optimizer_read": optimizer,
        "optimizer_write": optimizer,
        "forward_read": moved["extents"] * shape.accumulate,
        "backward_read": moved["extents"] * shape.accumulate,
        "parameters_write": moved["parameters"],
        **_gradient_traffic(moved["reduced"], moved["wide"], shape),
    }
    updated = Counter({where: n for where, n in updated.items() if n})
    return Account({key: n for key, n in held.items() if n}, traffic, dict(updated), moved["extents"] + optimizer)


def _gradient_traffic(reduced: int, wide: int, shape: Shape) -> dict[str, int]:
    """Bytes of gradients on nvme in one step: `reduced` in the reduce dtype, `wide` in fp32."""
    later = shape.arriving - 1
    return {
        "accumulate_read": reduced + (later - 1) * wide if later else 0,
        "gradients_read": wide if later else reduced,
        "gradients_write": reduced + later * wide,
    }


def device_update_bytes(shape: Shape, numel: int) -> int:
    """As `update_bytes`, on a device apart: the gradient is widened there first."""
    kept = shape.gradient_itemsize
    widened = kept + GRADIENT_BYTES if kept < GRADIENT_BYTES else 0
    return (2 * shape.device_state_itemsize + 2 * shape.parameter_dtype.itemsize + GRADIENT_BYTES + widened) * numel


def update_bytes(shape: Shape, numel: int) -> int:
    """Memory traffic of one update of `numel` elements: states and parameter read and written, gradient read."""
    return 2 * shape.state_bytes(numel) + (2 * shape.parameter_dtype.itemsize + shape.gradient_itemsize) * numel

"""What a placement costs: tiles with their tiers, slots, bytes per tier and kind. Pure; no memory is touched.

`plan_store` is what `TieredStore.attach` builds from, so that a plan and the run cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from zero_core.store import ShardSpec

from ..arena import PAGE_BYTES, Arena
from ..errors import BudgetError, PlacementError, gib
from ..placement import Placement, place, shares
from ..protocols import UpdateStep
from ..tier import Tier
from .tile import Record, Tile, check_tile_numel, cut, record_of, round_up

__all__ = [
    "KINDS",
    "MINIMUM_SLOTS",
    "StorePlan",
    "UnitPlan",
    "check_device_shares",
    "gradient_itemsize",
    "plan_store",
]

KINDS = ("parameters", "gradients", "optimizer", "buffers")
SMALL_UNIT_BYTES = 1 << 20
MINIMUM_SLOTS = 3  # one being read, one being updated, one being written
LANDING_BUFFERS = 2  # on a device apart: a gradient is written while the one before it is copied to the host
MIRROR_SLOTS = 3  # of host memory, each a tile of parameters: one copied down, one being updated, one copied up
STAGING_SLOTS = 4  # of host memory, each a tile in the reduce dtype: gradients that cannot go straight to their place
SPILL_SLOTS = 4  # of host memory, each of SPILL_PIECE_BYTES, that activations on nvme travel through
SPILL_PIECE_BYTES = 4 << 20
GRADIENT_BYTES = 4  # fp32: what an accumulated gradient takes; see gradient_itemsize


@dataclass(frozen=True)
class UnitPlan:
    """One shard: its tiles, and per tile the tier of parameter, gradient and state. Tiers never get faster along it."""

    spec: ShardSpec
    tiles: tuple[Tile, ...]
    records: tuple[Record | None, ...]  # None: a tile without a trainable element has no state
    parameter_tiers: tuple[Tier, ...]
    gradient_tiers: tuple[Tier, ...]
    state_tiers: tuple[Tier, ...]
    apart: bool = False  # the device tier is not host memory

    @property
    def trainable(self) -> bool:
        return any(tile.trainable for tile in self.tiles)

    def memory_numel(self, tiers: Sequence[Tier]) -> int:
        """Elements of the tiles in host memory; they follow those on a device apart, and lead those on nvme."""
        kept = sum(tile.numel for tile, tier in zip(self.tiles, tiers, strict=True) if tier != Tier.NVME)
        return kept - self.device_numel(tiers)

    def device_numel(self, tiers: Sequence[Tier]) -> int:
        """Elements of the leading tiles that are on a device apart."""
        if not self.apart:
            return 0
        return sum(tile.numel for tile, tier in zip(self.tiles, tiers, strict=True) if tier == Tier.DEVICE)

    @property
    def whole_numel(self) -> int:
        """Elements of the leading tiles whose parameter, gradient and states are all on a device apart."""
        return self.device_numel(self.state_tiers) if self.trainable else 0

    @property
    def streamed(self) -> bool:
        """Whether any of its parameters is on nvme: then it is used in a unit slot."""
        return Tier.NVME in self.parameter_tiers

    @property
    def parameter_bytes(self) -> int:
        return self.spec.numel * self.spec.dtype.itemsize


@dataclass(frozen=True)
class StorePlan:
    """Everything that `TieredStore` reserves, before it does."""

    units: tuple[UnitPlan, ...]
    tile_numel: int
    alignment: int
    state_slots: int
    state_slot_bytes: int
    gradient_slots: int
    gradient_slot_bytes: int
    unit_slots: int
    unit_slot_bytes: int
    own_slots: tuple[int, ...]  # streamed units so small that each has a slot of its own, of its own size
    landing_numel: int = 0  # of each of LANDING_BUFFERS on a device apart; 0: there is none
    landing_itemsize: int = 0
    own_landings: tuple[int, ...] = ()  # units which each have a landing buffer of their own size: see `lands_apart`
    state_itemsize: int = 0  # bytes of states of an element on a device apart
    mirror_slots: int = 0  # of parameters that live on a device apart while the host updates them
    mirror_slot_bytes: int = 0
    staging_slots: int = 0
    staging_slot_bytes: int = 0
    gradient_itemsize: int = GRADIENT_BYTES  # that is kept of an element
    not_sharded: Mapping[str, int] = field(default_factory=dict)  # bytes by name: in the model's own memory, not here

    def bytes_of(self, tier: Tier | str, kind: str) -> int:
        """Bytes of "parameters", "gradients", "optimizer" or "buffers" (slots; host only) in a tier."""
        tier = Tier(tier)
        if kind not in KINDS:
            raise KeyError(f"kind {kind!r}; known: {', '.join(KINDS)}")
        if kind == "buffers":
            device = self.landing_bytes + self.scratch_bytes(self.units)
            return {Tier.HOST: self.buffer_bytes, Tier.DEVICE: device}.get(tier, 0)
        return sum(self._unit_bytes(unit, tier, kind) for unit in self.units)

    def _unit_bytes(self, unit: UnitPlan, tier: Tier, kind: str) -> int:
        tiers = {"parameters": unit.parameter_tiers, "gradients": unit.gradient_tiers, "optimizer": unit.state_tiers}
        total = 0
        for tile, record, where in zip(unit.tiles, unit.records, tiers[kind], strict=True):
            if where != tier:
                continue
            if kind == "parameters":
                total += tile.numel * unit.spec.dtype.itemsize
            elif kind == "gradients" and unit.trainable:
                total += tile.numel * self.gradient_itemsize if where != Tier.NVME or tile.trainable else 0
            elif kind == "optimizer" and record is not None:
                total += record.nbytes
        if kind == "optimizer" and tier == Tier.DEVICE:
            total += unit.whole_numel * self.state_itemsize
        return total

    @property
    def landing_bytes(self) -> int:
        """On a device apart, where gradients leave from."""
        own = sum(self.units[i].spec.numel for i in self.own_landings)
        return (LANDING_BUFFERS * self.landing_numel + own) * self.landing_itemsize

    def scratch_bytes(self, units: Sequence[UnitPlan]) -> int:
        """In which a device apart widens the gradient of one unit's whole tiles."""
        widest = max((unit.whole_numel for unit in units), default=0)
        return GRADIENT_BYTES * widest if self.landing_itemsize < GRADIENT_BYTES else 0

    @property
    def buffer_bytes(self) -> int:
        """Slots of all sorts."""
        own = sum(Arena.rounded(round_up(self.units[i].parameter_bytes, self.alignment)) for i in self.own_slots)
        return own + sum(
            count * Arena.rounded(size)
            for count, size in (
                (self.state_slots, self.state_slot_bytes),
                (self.gradient_slots, self.gradient_slot_bytes),
                (self.unit_slots, self.unit_slot_bytes),
                (self.staging_slots, self.staging_slot_bytes),
                (self.mirror_slots, self.mirror_slot_bytes),
            )
        )

    @property
    def arena_bytes(self) -> int:
        """The arena, rounding of its blocks included."""
        return self.buffer_bytes + sum(self.unit_bytes(unit) for unit in self.units)

    def unit_bytes(self, unit: UnitPlan) -> int:
        """What lies in the arena of one unit, slots apart."""
        total = Arena.rounded(unit.memory_numel(unit.parameter_tiers) * unit.spec.dtype.itemsize)
        if unit.trainable:
            total += Arena.rounded(unit.memory_numel(unit.gradient_tiers) * self.gradient_itemsize)
        for record, tier in zip(unit.records, unit.state_tiers, strict=True):
            if record is not None and tier != Tier.NVME:
                total += Arena.rounded(record.nbytes)
        return total

    @property
    def nvme_bytes(self) -> int:
        """All extents, rounding included."""
        total = 0
        for unit in self.units:
            tiers = unit.parameter_tiers
            behind = unit.spec.numel - unit.device_numel(tiers) - unit.memory_numel(tiers)
            total += round_up(behind * unit.spec.dtype.itemsize, self.alignment)
            for tile, record, gradient, state in zip(
                unit.tiles, unit.records, unit.gradient_tiers, unit.state_tiers, strict=True
            ):
                if record is not None and state == Tier.NVME:
                    total += round_up(record.nbytes, self.alignment)
                if tile.trainable and gradient == Tier.NVME:
                    total += round_up(tile.numel * self.gradient_itemsize, self.alignment)
        return total


def plan_store(
    specs: Sequence[ShardSpec],
    step: UpdateStep,
    *,
    parameters: Placement = "host",
    gradients: Placement = "host",
    optimizer: Placement = "host",
    tile_numel: int = 1 << 22,
    slots: int | None = None,
    host_bytes: int | None = None,
    prefetch_bytes: int = 0,
    shard_count: int = 1,
    alignment: int = PAGE_BYTES,
    landing_dtype: torch.dtype | None = None,
    gradient_itemsize: int = GRADIENT_BYTES,
) -> StorePlan:
    """Cut, place and count. `step` is bound already.

    `slots`: of states and of gradients each; None: a quarter of what is on nvme, at least 3, fewer where `host_bytes`
    is short. `landing_dtype`: with a device apart from the host, the reduce dtype of what comes from it.
    `gradient_itemsize`: as the function of that name gives it. Raises PlacementError, or BudgetError when `host_bytes`
    is too small even with 3 slots.
    """
    check_tile_numel(tile_numel)
    if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or slots < MINIMUM_SLOTS):
        raise PlacementError(f"slots={slots!r}: at least {MINIMUM_SLOTS} (a read, an update and a write at a time)")
    alignment = max(alignment, PAGE_BYTES)
    apart = landing_dtype is not None
    if apart:
        check_device_shares(parameters, gradients, optimizer)
    units = _place_units(specs, step, (parameters, gradients, optimizer), tile_numel, alignment, apart)
    states = [r.nbytes for u in units for r, t in zip(u.records, u.state_tiers, strict=True) if r and t == Tier.NVME]
    swapped_gradients = [
        round_up(tile.numel * gradient_itemsize, alignment)
        for unit in units
        for tile, tier in zip(unit.tiles, unit.gradient_tiers, strict=True)
        if tile.trainable and tier == Tier.NVME
    ]
    own, shared = _unit_slots(units, prefetch_bytes // max(1, shard_count))
    largest = max((u.parameter_bytes for u in units if u.streamed), default=0)
    plan = StorePlan(
        units=units,
        tile_numel=tile_numel,
        alignment=alignment,
        state_slots=_slots(states, slots),
        state_slot_bytes=max(states, default=0),
        gradient_slots=_slots(swapped_gradients, slots),
        gradient_slot_bytes=max(swapped_gradients, default=0),
        unit_slots=shared,
        unit_slot_bytes=round_up(largest, alignment),
        own_slots=own,
        gradient_itemsize=gradient_itemsize,
        **(_apart(units, landing_dtype, step) if landing_dtype is not None else {}),
    )
    return plan if host_bytes is None else _fit(plan, host_bytes, fixed=slots is not None)


def gradient_itemsize(reduce_dtype: torch.dtype, accumulate: int | None) -> int:
    """Bytes that are kept of an element of a gradient, of which `accumulate` reach the store before a step.

    One alone stays as it came. What is added to it is summed in fp32. None: it is not known how many.
    """
    return reduce_dtype.itemsize if accumulate == 1 else GRADIENT_BYTES


def check_device_shares(parameters: Placement, gradients: Placement, optimizer: Placement) -> None:
    """Raises PlacementError unless tiles whose states are on a device apart have everything else there too."""
    below, states = shares(gradients, "gradients"), shares(optimizer, "optimizer")[Tier.DEVICE]
    if not math.isclose(below[Tier.DEVICE], states, abs_tol=1e-6):
        raise PlacementError(
            f"gradients={gradients!r} and optimizer={optimizer!r}: on a device apart a tile's gradient is where its "
            f'states are; give both the same share of "device" ({states:g})'
        )
    if shares(parameters, "parameters")[Tier.DEVICE] < states - 1e-6:
        raise PlacementError(
            f"parameters={parameters!r} and optimizer={optimizer!r}: states on the device need their parameters there; "
            f'give parameters at least {states:g} of "device"'
        )


def lands_apart(numel: int, largest: int, itemsize: int, encloses: bool) -> bool:
    """Whether a gradient of `numel` elements, where the `largest` has so many, lands in a buffer of its own.

    A unit that is open during the whole backward would hold a buffer that the others take turns with; a small one, such
    as a final norm, may be.
    """
    return encloses or numel * itemsize <= min(largest * itemsize // 16, SMALL_UNIT_BYTES)


def _apart(units: Sequence[UnitPlan], dtype: torch.dtype, step: UpdateStep) -> dict[str, Any]:
    """What a device apart needs: where gradients pass through, where the host updates parameters that live there."""
    below = [unit for unit in units if unit.trainable and unit.whole_numel < unit.spec.numel]
    tile = max((tile.numel for unit in below for tile in unit.tiles), default=0)
    homes = [
        tile.numel * unit.spec.dtype.itemsize
        for unit in units
        for tile in unit.tiles
        if unit.whole_numel < tile.stop <= unit.device_numel(unit.parameter_tiers)
    ]
    largest = max((unit.spec.numel for unit in below if not unit.spec.encloses), default=0)
    return {
        "landing_numel": largest,
        "landing_itemsize": dtype.itemsize,
        "own_landings": tuple(
            i
            for i, unit in enumerate(units)
            if unit.trainable
            and unit.whole_numel < unit.spec.numel
            and lands_apart(unit.spec.numel, largest, dtype.itemsize, unit.spec.encloses)
        ),
        "staging_slots": STAGING_SLOTS if below else 0,
        "staging_slot_bytes": round_up(tile * dtype.itemsize, PAGE_BYTES),
        "state_itemsize": 4 * (len(step.state_names()) + any(unit.spec.dtype != torch.float32 for unit in units)),
        "mirror_slots": MIRROR_SLOTS if homes else 0,
        "mirror_slot_bytes": round_up(max(homes, default=0), PAGE_BYTES),
    }


def _place_units(
    specs: Sequence[ShardSpec],
    step: UpdateStep,
    placements: tuple[Placement, Placement, Placement],
    tile_numel: int,
    alignment: int,
    apart: bool,
) -> tuple[UnitPlan, ...]:
    tiles = [cut(number, spec, tile_numel) for number, spec in enumerate(specs)]
    sizes = [tile.numel for unit in tiles for tile in unit]
    flat = [place(where, sizes, kind) for where, kind in zip(placements, KINDS, strict=False)]
    cache: dict[tuple[int, torch.dtype], Record] = {}
    units, at = [], 0
    for spec, unit in zip(specs, tiles, strict=True):
        records: list[Record | None] = []
        tiers = [kind[at : at + len(unit)] for kind in flat]
        for tile, state in zip(unit, tiers[2], strict=True):
            if apart and state == Tier.DEVICE:
                records.append(None)  # its states are the device's own
                continue
            key = (tile.numel, spec.dtype)
            if tile.trainable and key not in cache:
                cache[key] = record_of(step, *key, alignment)
            records.append(cache[key] if tile.trainable and cache[key].nbytes else None)
        units.append(UnitPlan(spec, unit, tuple(records), tiers[0], tiers[1], tiers[2], apart))
        at += len(unit)
    return tuple(units)


def _unit_slots(units: Sequence[UnitPlan], prefetch_bytes: int) -> tuple[tuple[int, ...], int]:
    """Streamed units with a slot of their own, and how many slots the others share: those prefetched, and two.

    A final norm open during the whole forward would otherwise take a slot as large as a block's. Small ones together
    cost no more than one shared slot.
    """
    sizes = sorted((unit.parameter_bytes, i) for i, unit in enumerate(units) if unit.streamed)
    largest = sizes[-1][0] if sizes else 0
    own, taken = [], 0
    for size, i in sizes:
        if size > min(largest // 16, SMALL_UNIT_BYTES) or taken + size > largest:
            break
        own.append(i)
        taken += size
    ahead, room = 0, prefetch_bytes
    for size, _ in sizes[len(own) :]:
        room -= size
        ahead += room >= 0
    return tuple(sorted(own)), min(len(sizes) - len(own), max(1, ahead) + 2)


def _slots(sizes: Sequence[int], wanted: int | None) -> int:
    """A quarter of the bytes, at least 3, never more than there are tiles."""
    if not sizes:
        return 0
    quarter = -(-sum(sizes) // (4 * max(sizes)))
    return min(len(sizes), max(MINIMUM_SLOTS, quarter if wanted is None else wanted))


def _fit(plan: StorePlan, host_bytes: int, *, fixed: bool) -> StorePlan:
    """The plan with as many slots as the budget holds. BudgetError with what is missing and what to change."""
    smallest = replace(
        plan,
        state_slots=min(plan.state_slots, MINIMUM_SLOTS),
        gradient_slots=min(plan.gradient_slots, MINIMUM_SLOTS),
    )
    least = plan if fixed else smallest
    if least.arena_bytes > host_bytes:
        parts = ", ".join(
            f"{kind} {gib(least.bytes_of('host', kind) + least.bytes_of('device', kind))}" for kind in KINDS
        )
        movable = [kind for kind in KINDS[:3] if least.bytes_of("host", kind) or least.bytes_of("device", kind)]
        remedies = [f'{kind}="nvme"' for kind in reversed(movable)]
        if fixed and smallest.arena_bytes < least.arena_bytes:
            remedies.append(f"slots={MINIMUM_SLOTS}")
        if plan.tile_numel > 1 << 20:
            remedies.append("a smaller tile_numel")
        raise BudgetError(
            f"host tier needs {gib(least.arena_bytes)} ({parts}), budget is {gib(host_bytes)}: "
            f"{gib(least.arena_bytes - host_bytes)} are missing; lower it with {', '.join(remedies) or 'more ranks'}, "
            "or raise host_bytes"
        )
    while plan.arena_bytes > host_bytes:
        if plan.state_slots >= plan.gradient_slots and plan.state_slots > smallest.state_slots:
            plan = replace(plan, state_slots=plan.state_slots - 1)
        elif plan.gradient_slots > smallest.gradient_slots:
            plan = replace(plan, gradient_slots=plan.gradient_slots - 1)
        else:
            plan = replace(plan, state_slots=plan.state_slots - 1)
    return plan

"""Turns shards into a `StorePlan`: cuts them into tiles, places these on tiers, and fits slots to a budget. Pure.

[Note: Units that are alike]
In a store every unit is a run of its own. When a model is planned that does not exist yet, consecutive units that are
alike form one run, which ends where the placement changes. A trillion parameters have ten thousand units, and the
planner tries many placements, so `Shards` cuts the units into tiles once and can place them many times.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate, pairwise, product
from typing import Any

import torch

from ..core import FP32_BYTES, UNCUT_BYTES, Segment, ShardSpec, round_up
from ..errors import BudgetError, PlacementError, gib
from ..memory.arena import PAGE_BYTES
from ..protocols import UpdateStep
from ..tier import TIERS, Tier
from ..uncut_step import UncutStep, names_of
from .footprint import KINDS, STATE_KINDS, PlacedUnit, StorePlan, UnitRun
from .tile import Placement, Record, Tile, check_device_shares, check_tile_numel, cut, record_of, shares, tier_at

MEMORY = (Tier.DEVICE, Tier.HOST)
SMALL_UNIT_BYTES = 1 << 20
LARGE_UNITS = 4  # most units, such as an embedding and a head, that have slots of their own because they are large
MINIMUM_SLOTS = 3  # one being read, one being updated, one being written
MIRROR_SLOTS = 3  # of host memory, each a tile of parameters: one copied down, one being updated, one copied up
MOST_VISITS = 3  # of other tiers' tiles on a discrete device: one copied up, one being updated, one copied down
VISIT_BYTES = 24  # scratch per element of another tile that a discrete device updates: see `_adam` in torch_step.py
STAGING_SLOTS = 4  # of host memory, each a tile in the reduce dtype: gradients that cannot go straight to their place


class Shards:
    """Shards that are cut into tiles once and can be placed many times. Shards that are alike are counted together.

    `shards`: pairs of a shard and the number of consecutive shards like it. `landing_dtype`: with a discrete device,
    the dtype of reduced gradients that it sends. `gradient_itemsize`: bytes of a kept gradient per element
    (`ElementBytes.gradient`). `tiers`: all tiers, fast to slow. `update_share`: see `cut`; 0 without a discrete device.
    """

    def __init__(
        self,
        shards: Iterable[tuple[ShardSpec, int]],
        step: UpdateStep,
        *,
        tile_numel: int = 1 << 22,
        prefetch_bytes: int = 0,
        shard_count: int = 1,
        alignment: int = PAGE_BYTES,
        landing_dtype: torch.dtype | None = None,
        gradient_itemsize: int = FP32_BYTES,
        tiers: tuple[Tier, ...] = TIERS,
        update_share: float = 0.0,
    ) -> None:
        shards = list(shards)
        check_tile_numel(tile_numel)
        _check_alignment((spec for spec, _ in shards), alignment)
        self._step, self._tile_numel, self._alignment = step, tile_numel, max(alignment, PAGE_BYTES)
        self._prefetch_bytes, self._gradient_itemsize = prefetch_bytes, gradient_itemsize
        self._shard_count = max(1, shard_count)
        self._landing_dtype, self.discrete = landing_dtype, landing_dtype is not None
        self._tiers = tiers
        self._record_of = cache(partial(record_of, step, alignment=self._alignment))
        self.cut: list[UnitRun] = []
        self.numel = self.trained_numel = 0
        for number, (spec, count) in enumerate(shards):
            tiles = cut(number, spec, tile_numel, discrete=self.discrete, update_share=update_share)
            unit = PlacedUnit(spec, tiles, (), (), (), (), self.discrete)
            self.cut.append(UnitRun(unit, count, self.numel, self.trained_numel))
            self.numel += count * spec.numel
            self.trained_numel += count * spec.numel * spec.trained

    def ends(self, *, trained: bool) -> list[float]:
        """Where each unit ends, as a fraction of all elements, or of the trained ones."""
        specs = [run.unit.spec for run in self.cut for _ in range(run.count)]
        numels = [spec.numel * (spec.trained or not trained) for spec in specs]
        total = max(1, sum(numels))
        return [end / total for end in accumulate(numels, initial=0)]

    def place(self, placements: Mapping[str, Placement], slots: int | None) -> StorePlan:
        """The plan of these placements, by kind. Raises PlacementError for an impossible one, or too few `slots`."""
        if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or slots < MINIMUM_SLOTS):
            raise PlacementError(f"slots={slots!r} is below {MINIMUM_SLOTS}: one each for a read, an update, a write")
        fractions = [shares(placements[kind], kind, self._tiers) for kind in STATE_KINDS]
        bounds = [[bound for bound in accumulate(kind.values()) if 0 < bound < 1] for kind in fractions]
        runs = [placed for run in self.cut for placed in self._placed(run, fractions, bounds)]
        states, gradients = Counter[int](), Counter[int]()  # stored tiles by the bytes that they take of a slot
        for run in runs:
            for _, nbytes in run.unit.stored_records():
                states[nbytes] += run.count
            for _, nbytes in run.unit.stored_gradients(self._gradient_itemsize, self._alignment):
                gradients[nbytes] += run.count
        units = [run.unit for run in runs for _ in range(run.count)]
        own, shared, largest = slots_of_units(units, self._prefetch_bytes, self._shard_count)
        here = self._scratch(run.unit for run in runs if run.unit.whole)
        away = self._scratch(run.unit for run in runs if not run.unit.whole)
        visiting = self._visiting(runs) if self.discrete else 0
        plan = StorePlan(
            runs=tuple(runs),
            tile_numel=self._tile_numel,
            alignment=self._alignment,
            state_slots=_slots(states, slots),
            state_slot_bytes=max(states, default=0),
            gradient_slots=_slots(gradients, slots),
            gradient_slot_bytes=max(gradients, default=0),
            unit_slots=shared,
            unit_slot_bytes=round_up(largest, self._alignment),
            own_slots=own,
            gradient_itemsize=self._gradient_itemsize,
            tiers=self._tiers,
            scratch_bytes=0 if self.discrete else away,
            device_scratch_bytes=here + (away + visiting if self.discrete else 0),
        )
        return plan if self._landing_dtype is None else _with_link(plan, self._landing_dtype, self._step)

    def _scratch(self, units: Iterable[PlacedUnit]) -> int:
        """Upper bound on the scratch bytes of the update of one uncut tile of these units."""
        if not isinstance(self._step, UncutStep):
            return 0
        found = (tile.uncut for unit in units for tile in unit.tiles if tile.uncut is not None)
        uncut = {(segment.group or 0, segment.uncut_shape) for segment in found}
        return max((self._step.scratch_bytes(group, shape) for group, shape in uncut), default=0)

    def _visiting(self, runs: Iterable[UnitRun]) -> int:
        """Bytes of the tiles that visit a discrete device at once for their updates, and of the scratch of one that is
        not uncut: see `device_link.py`.

        Of the tiles whose parameters have their home there, at most one is counted.
        """
        found, at_home, total, room, largest = Counter[int](), 0, 0, MOST_VISITS, 0
        for run in runs:
            if not run.unit.whole:
                for tile, record in zip(run.unit.tiles, run.unit.records, strict=True):
                    if tile.visits and tile.trainable:
                        largest = max(largest, tile.numel * (tile.uncut is None))
                        nbytes = 0 if record is None else record.nbytes
                        nbytes += tile.numel * (run.unit.spec.dtype.itemsize + self._gradient_itemsize)
                        found[nbytes] += 0 if run.unit.home else run.count
                        at_home = max(at_home, nbytes if run.unit.home else 0)
        found[at_home] += 1
        for nbytes, count in sorted(found.items(), reverse=True):
            total += nbytes * min(count, room)
            room -= min(count, room)
        return total + VISIT_BYTES * largest

    def _placed(
        self, run: UnitRun, fractions: Sequence[Mapping[Tier, float]], bounds: Sequence[Sequence[float]]
    ) -> Iterator[UnitRun]:
        """Cuts the run where a placement changes; only a part of one unit has a change inside. Adds tiers and records.

        A share of the parameters counts all elements; a share of gradients or states counts trained elements.
        """
        spec, tiles = run.unit.spec, run.unit.tiles
        trained = (run.trained_start, max(1, self.trained_numel))
        scales = [(run.start, max(1, self.numel)), trained, trained]
        ends = {0, run.count}
        for (start, numel), of_kind in zip(scales, bounds, strict=True):
            for bound in of_kind:
                at = int((bound * numel - start) // spec.numel) if spec.numel else 0
                ends |= {end for end in range(at - 1, at + 3) if 0 < end < run.count}
        for first, stop in pairwise(sorted(ends)):
            before = first * spec.numel
            parameters, gradients, states = (
                self._tiers_of(tiles, start + before, numel, kind)
                for (start, numel), kind in zip(scales, fractions, strict=True)
            )
            if self.discrete and spec.trained and states[:1] == (Tier.DEVICE,):
                parameters = states  # a share of all elements may end before the same share of the trained ones
            records = tuple(self._record(tile, spec.dtype, tier) for tile, tier in zip(tiles, states, strict=True))
            unit = PlacedUnit(spec, tiles, records, parameters, gradients, states, self.discrete)
            yield UnitRun(unit, stop - first, run.start + before, run.trained_start + before * spec.trained)

    def _tiers_of(
        self, tiles: Sequence[Tile], start: int, numel: int, fractions: Mapping[Tier, float]
    ) -> tuple[Tier, ...]:
        """The tier of each tile of a unit with `start` of `numel` elements before it.

        A discrete device takes whole units: those whose middle is within its fraction. The others begin behind it.
        """
        least = 0.0
        if self.discrete and tiles:
            if tier_at(min(1.0, (start + tiles[-1].stop / 2) / numel), fractions) == Tier.DEVICE:
                return (Tier.DEVICE,) * len(tiles)
            least = fractions[Tier.DEVICE]
        middles = ((start + tile.start + tile.numel / 2) / numel for tile in tiles)
        return tuple(tier_at(min(1.0, max(least, middle)), fractions) for middle in middles)

    def _record(self, tile: Tile, dtype: torch.dtype, state: Tier) -> Record | None:
        """The record of a tile; None if no element has a state, or a discrete device keeps the states."""
        if not tile.trainable or (self.discrete and state == Tier.DEVICE):
            return None
        record = self._record_of(tile.numel, dtype, uncut=tile.uncut)
        return record if record.nbytes else None


def _check_alignment(specs: Iterable[ShardSpec], alignment: int) -> None:
    """Raises PlacementError where tiles that are whole parameters would begin inside of a store's blocks."""
    uncut = next((s.name for spec in specs for s in spec.segments if s.uncut), None)
    if uncut is not None and UNCUT_BYTES % alignment:
        raise PlacementError(
            f"the optimizer updates parameter {uncut} whole, so its tiles begin at multiples of {UNCUT_BYTES} bytes. "
            f"But the ByteStores can only write at multiples of {alignment} bytes: give ByteStores whose alignment "
            f"divides {UNCUT_BYTES}, such as zero_nvme.Slab([path], direct=False)"
        )


def plan_store(
    specs: Sequence[ShardSpec],
    step: UpdateStep,
    *,
    parameters: Placement = Tier.HOST,
    gradients: Placement = Tier.HOST,
    optimizer: Placement = Tier.HOST,
    slots: int | None = None,
    host_bytes: int | None = None,
    **how: Any,
) -> StorePlan:
    """Cuts shards into tiles, places these, and counts slots. `step` must be bound.

    `slots`: the number for states, and the same for gradients; None: enough for a quarter of the stored bytes, at least
    3, fewer where `host_bytes` is short. `how`: the other arguments of `Shards`. Raises PlacementError, or BudgetError
    when `host_bytes` is too small even with 3 slots.
    """
    shards = Shards(((spec, 1) for spec in specs), step, **how)
    if shards.discrete:
        check_device_shares(parameters, gradients, optimizer)
    plan = shards.place({"parameters": parameters, "gradients": gradients, "optimizer": optimizer}, slots)
    return plan if host_bytes is None else _fit(plan, host_bytes, fixed=slots is not None)


def _with_link(plan: StorePlan, dtype: torch.dtype, step: UpdateStep) -> StorePlan:
    """Adds a discrete device's buffers: landing and staging for gradients, mirrors in which the host updates homes."""
    units = [run.unit for run in plan.runs]
    away = [unit for unit in units if unit.trainable and not unit.whole]
    tile = max((tile.numel for unit in away for tile in unit.tiles), default=0)
    homes = [tile.numel * unit.spec.dtype.itemsize for unit in units if unit.home for tile in unit.tiles]
    largest = max((unit.spec.numel for unit in away if not unit.spec.encloses), default=0)
    # A unit that is open during the whole backward would hold a buffer that the others take turns with. A small unit,
    # such as a final norm, may be open that long.
    small = min(largest * dtype.itemsize // 16, SMALL_UNIT_BYTES)
    own = {id(unit) for unit in away if unit.spec.encloses or unit.spec.numel * dtype.itemsize <= small}
    uncuts = [tile.uncut for unit in units if unit.whole for tile in unit.tiles if tile.uncut is not None]
    records = (record_of(step, math.prod(u.uncut_shape), torch.float32, 1, u) for u in uncuts)
    numbers = [sum(field.numel for field in record.fields) for record in records]
    return replace(
        plan,
        landing_numel=largest,
        landing_itemsize=dtype.itemsize,
        own_landings=tuple(i for i, unit in enumerate(plan.units) if id(unit) in own),
        staging_slots=STAGING_SLOTS if away else 0,
        staging_slot_bytes=round_up(tile * dtype.itemsize, PAGE_BYTES),
        state_values=len(names_of(step, Segment(0, 0, None, ""))),
        uncut_values=tuple(((u.group, u.uncut_shape), n) for u, n in zip(uncuts, numbers, strict=True)),
        mirror_slots=MIRROR_SLOTS if homes else 0,
        mirror_slot_bytes=round_up(max(homes, default=0), PAGE_BYTES),
    )


def slots_of_units(
    units: Sequence[PlacedUnit], prefetch_bytes: int, shard_count: int = 1
) -> tuple[tuple[int, ...], int, int]:
    """Returns the streamed units with a slot of their own, the number of shared slots, and the bytes of a shared slot.

    The others share as many slots as are prefetched, and two more. If all units shared slots, a final norm that is open
    during the whole forward would take a slot as large as a block's, and so would each block's adapters, and an
    embedding would make every slot as large as itself. So the smallest units have slots of their own, if these take no
    more memory together than one shared slot. More of the smallest and of the largest units have one where the slots
    then take less memory in all. A unit with a slot of its own is read once. Units that are in use around others have a
    slot more for each level of them. Where modules open several units at once, there are that many shared slots for
    each unit that would be in use.
    """
    sizes = sorted((unit.parameter_bytes, i) for i, unit in enumerate(units) if unit.streamed)
    ends = [0, *accumulate(size for size, _ in sizes)]
    largest, small = (sizes[-1][0] if sizes else 0), 0
    while small < len(sizes) and sizes[small][0] <= min(largest // 16, SMALL_UNIT_BYTES) and ends[small + 1] <= largest:
        small += 1
    wholes = [units[i].spec.unit_numel(shard_count) * units[i].spec.dtype.itemsize for _, i in sizes]
    edges = [k for k in range(1, len(sizes)) if sizes[k - 1][0] < sizes[k][0]]
    firsts = [small, *(k for k in edges if k > small and sizes[k - 1][0] <= largest // 16)]
    lasts = [len(sizes), *(k for k in edges if len(sizes) - k <= LARGE_UNITS)]
    best: tuple[float, int, int, int, int] = math.inf, 0, 0, 0, 0
    for first, last in product(firsts, lasts):
        if first <= last:
            ahead = bisect_right(list(accumulate(sorted(wholes[first:last]))), prefetch_bytes)
            opened = _opened_at_once([units[i].spec for _, i in sizes[first:last]])
            most = max(opened, default=1)
            count = min(last - first, max(most, ahead) + most + sum(opened))
            nbytes = sizes[last - 1][0] if first < last else 0
            total = ends[first] + count * nbytes + ends[-1] - ends[last]
            if total < best[0]:
                best = total, first, last, count, nbytes
    _, first, last, count, nbytes = best
    return tuple(sorted(i for _, i in (*sizes[:first], *sizes[last:]))), count, nbytes


def _opened_at_once(specs: Sequence[ShardSpec]) -> list[int]:
    """For each depth at which these units are, how many of them modules open at once."""
    depths = {spec.depth for spec in specs if not spec.encloses} or {0}
    beside = Counter((spec.depth, spec.beside) for spec in specs if spec.beside is not None)
    return [max((n for (at, _), n in beside.items() if at == depth), default=1) for depth in sorted(depths)]


def _slots(tiles: Counter[int], wanted: int | None) -> int:
    """`wanted` slots, or enough for a quarter of the bytes: at least 3, at most one a tile. `tiles`: size -> count."""
    if not tiles:
        return 0
    quarter = -(-sum(size * count for size, count in tiles.items()) // (4 * max(tiles)))
    return min(tiles.total(), max(MINIMUM_SLOTS, quarter if wanted is None else wanted))


def _fit(plan: StorePlan, host_bytes: int, *, fixed: bool) -> StorePlan:
    """The plan with as many slots as the budget holds. Raises BudgetError with the bytes missing and ways out."""

    def at_most(slots: int) -> StorePlan:
        return replace(plan, state_slots=min(plan.state_slots, slots), gradient_slots=min(plan.gradient_slots, slots))

    smallest = at_most(MINIMUM_SLOTS)
    least = plan if fixed else smallest
    if least.arena_bytes > host_bytes:
        parts = ", ".join(f"{kind} {gib(sum(least.bytes_of(tier, kind) for tier in MEMORY))}" for kind in KINDS)
        movable = [kind for kind in STATE_KINDS if any(least.bytes_of(tier, kind) for tier in MEMORY)]
        remedies = [f'{kind}="{plan.tiers[-1]}"' for kind in reversed(movable)]
        if fixed and smallest.arena_bytes < least.arena_bytes:
            remedies.append(f"slots={MINIMUM_SLOTS}")
        if plan.tile_numel > 1 << 20:
            remedies.append("a smaller tile_numel")
        raise BudgetError(
            f"host tier needs {gib(least.arena_bytes)} ({parts}), budget is {gib(host_bytes)}: "
            f"{gib(least.arena_bytes - host_bytes)} missing; save memory with "
            f"{', or '.join(remedies) or 'more ranks'}, or raise host_bytes"
        )
    most = max(plan.state_slots, plan.gradient_slots)
    plans = map(at_most, range(most, -1, -1))
    return next(fewer for fewer in plans if fewer.arena_bytes <= host_bytes)

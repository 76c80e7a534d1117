"""What a placement costs: tiles with their tiers, slots, bytes per tier and kind. Pure; no memory is touched.

`plan_store` is what `TieredStore.attach` builds from, and `planning` counts with the same `StorePlan`, so that a plan
and the run cannot disagree. What an element costs is `zero_core.memory`'s.

[Note: Units that are alike]
A store has runs of one unit each. A plan of a model that does not exist has one run of all units in a row that are
alike, cut where a placement changes: a trillion parameters have ten thousand units, and the planner tries many
placements of them. So `Shards` cuts once and places as often as it is asked to.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise, product
from operator import itemgetter

import torch

from zero_core.memory import FP32_BYTES, ElementBytes
from zero_core.store import ShardSpec

from ..arena import PAGE_BYTES, Arena
from ..errors import BudgetError, PlacementError, gib
from ..placement import Placement, device_share, shares, tier_at
from ..protocols import UpdateStep
from ..tier import TIERS, Tier
from .tile import Record, Tile, check_tile_numel, cut, record_of, round_up

__all__ = [
    "KINDS",
    "MINIMUM_SLOTS",
    "STATE_KINDS",
    "Shards",
    "StorePlan",
    "UnitPlan",
    "UnitRun",
    "check_device_shares",
    "plan_store",
    "resident_slots",
]

KINDS = ("parameters", "gradients", "optimizer", "buffers")
STATE_KINDS = KINDS[:3]
SMALL_UNIT_BYTES = 1 << 20
LARGE_UNITS = 4  # at most so many, an embedding and a head for example, have slots of their own because they are large
PASSING_SLOTS = 12  # for states that are read, updated and written at a time
MINIMUM_SLOTS = 3  # one being read, one being updated, one being written
LANDING_BUFFERS = 2  # on a discrete device: a gradient is written while the one before it is copied to the host
MIRROR_SLOTS = 3  # of host memory, each a tile of parameters: one copied down, one being updated, one copied up
STAGING_SLOTS = 4  # of host memory, each a tile in the reduce dtype: gradients that cannot go straight to their place
SPILL_SLOTS = 4  # of host memory, each of SPILL_PIECE_BYTES, that activations on nvme travel through
SPILL_PIECE_BYTES = 4 << 20
GRADIENT_BYTES = FP32_BYTES  # what an accumulated gradient takes


@dataclass(frozen=True)
class UnitPlan:
    """One shard: its tiles, and per tile the tier of parameter, gradient and state. Tiers never get faster along it."""

    spec: ShardSpec
    tiles: tuple[Tile, ...]
    records: tuple[Record | None, ...]  # None: a tile without a trainable element has no state
    parameter_tiers: tuple[Tier, ...]
    gradient_tiers: tuple[Tier, ...]
    state_tiers: tuple[Tier, ...]
    discrete: bool = False  # the device tier is not host memory; then all tiles of a kind are there, or none

    @cached_property
    def trainable(self) -> bool:
        return any(tile.trainable for tile in self.tiles)

    @property
    def cuts(self) -> bool:
        """Whether a tile ends inside of a parameter that is trained."""
        trained = [segment for segment in self.spec.segments if segment.group is not None]
        return any(segment.start < tile.start < segment.stop for tile in self.tiles for segment in trained)

    def rows(self) -> Iterator[tuple[Tile, Record | None, Tier, Tier, Tier]]:
        """Each tile with its record and the tiers of its parameter, gradient and state."""
        return zip(self.tiles, self.records, self.parameter_tiers, self.gradient_tiers, self.state_tiers, strict=True)

    def stored(self, tiers: Sequence[Tier]) -> Iterator[tuple[Tier, int, int]]:
        """(tier, start, stop) of the elements that each stored tier has. They are the last ones."""
        for tier, rows in groupby(zip(tiers, self.tiles, strict=True), key=itemgetter(0)):
            tiles = [tile for _, tile in rows]
            if tier.stored:
                yield tier, tiles[0].start, tiles[-1].stop

    def memory_numel(self, tiers: Sequence[Tier]) -> int:
        """Elements of the tiles in host memory; they lead those that are stored."""
        if self._on_device(tiers):
            return 0
        return self.spec.numel - sum(stop - start for _, start, stop in self.stored(tiers))

    def _on_device(self, tiers: Sequence[Tier]) -> bool:
        return self.discrete and tiers[:1] == (Tier.DEVICE,)

    @property
    def home(self) -> bool:
        """Whether its parameters live on a discrete device while its states, if it has any, do not."""
        return self._on_device(self.parameter_tiers) and not self.whole

    @property
    def whole(self) -> bool:
        """Whether its parameters, gradient and states are all on a discrete device."""
        return self.trainable and self._on_device(self.state_tiers)

    @property
    def streamed(self) -> bool:
        """Whether any of its parameters is stored: then it is used in a unit slot."""
        return any(tier.stored for tier in self.parameter_tiers)

    @property
    def parameter_bytes(self) -> int:
        return self.spec.numel * self.spec.dtype.itemsize


@dataclass(frozen=True)
class UnitRun:
    """`count` units in a row which are alike. The first one's plan.

    start, trained_start: how many elements, and how many trained ones, are before it in all shards.
    """

    unit: UnitPlan
    count: int = 1
    start: int = 0
    trained_start: int = 0


@dataclass(frozen=True)
class StorePlan:
    """Everything that `TieredStore` reserves, before it does."""

    runs: tuple[UnitRun, ...]
    tile_numel: int
    alignment: int
    state_slots: int
    state_slot_bytes: int
    gradient_slots: int
    gradient_slot_bytes: int
    unit_slots: int
    unit_slot_bytes: int
    own_slots: tuple[int, ...]  # streamed units that each have a slot of their own, of their own size
    landing_numel: int = 0  # of each of LANDING_BUFFERS on a discrete device; 0: there is none
    landing_itemsize: int = 0
    own_landings: tuple[int, ...] = ()  # units which each have a landing buffer of their own size: see `_discrete`
    state_values: int = 0  # fp32 values that a discrete device keeps of an element besides the master
    mirror_slots: int = 0  # of parameters that live on a discrete device while the host updates them
    mirror_slot_bytes: int = 0
    staging_slots: int = 0
    staging_slot_bytes: int = 0
    gradient_itemsize: int = FP32_BYTES  # that is kept of an element
    tiers: tuple[Tier, ...] = TIERS  # fast to slow

    @cached_property
    def units(self) -> tuple[UnitPlan, ...]:
        """Every unit; those of one run have the first one's plan."""
        return tuple(run.unit for run in self.runs for _ in range(run.count))

    @cached_property
    def held(self) -> Mapping[tuple[str, str], int]:
        """Bytes by tier and kind: "parameters", "gradients", "optimizer" and "buffers" (slots, landing buffers)."""
        held = Counter({("host", "buffers"): self.buffer_bytes, ("device", "buffers"): self.landing_bytes})
        for run in self.runs:
            unit, count = run.unit, run.count
            master = ElementBytes(unit.spec.dtype, unit.spec.dtype, self.state_values)
            if unit.whole:
                held["device", "optimizer"] += count * unit.spec.numel * master.optimizer
            for tile, record, parameter, gradient, state in unit.rows():
                held[parameter.value, "parameters"] += count * tile.numel * unit.spec.dtype.itemsize
                if unit.trainable and (tile.trainable or not gradient.stored):
                    held[gradient.value, "gradients"] += count * tile.numel * self.gradient_itemsize
                if record is not None:
                    held[state.value, "optimizer"] += count * record.nbytes
        return {key: nbytes for key, nbytes in held.items() if nbytes}

    def bytes_of(self, tier: str, kind: str) -> int:
        """As `held`."""
        for name, known in ((kind, KINDS), (tier, self.tiers)):
            if name not in known:
                raise KeyError(f"no figure for {kind!r} on {tier!r}: known instead of {name!r}: {', '.join(known)}")
        return self.held.get((tier, kind), 0)

    @property
    def below(self) -> bool:
        """Whether any tile of any kind is not on the device."""
        return any(tier != Tier.DEVICE for run in self.runs for _, _, *tiers in run.unit.rows() for tier in tiers)

    @property
    def landing_bytes(self) -> int:
        """On a discrete device: where gradients leave from, and where that of one whole unit is widened."""
        own = sum(self.units[i].spec.numel for i in self.own_landings)
        widest = max((run.unit.spec.numel for run in self.runs if run.unit.whole), default=0)
        widened = FP32_BYTES * widest if self.landing_itemsize < FP32_BYTES else 0
        return (LANDING_BUFFERS * self.landing_numel + own) * self.landing_itemsize + widened

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
        blocks = ((run.count, tier, n) for run in self.runs for tier, n in self._blocks(run.unit))
        return self.buffer_bytes + sum(count * Arena.rounded(n) for count, tier, n in blocks if not tier.stored)

    def extent_bytes(self, tier: str) -> int:
        """All extents on a stored tier, rounding included."""
        blocks = ((run.count, n) for run in self.runs for where, n in self._blocks(run.unit) if where == tier)
        return sum(count * round_up(n, self.alignment) for count, n in blocks)

    def _blocks(self, unit: UnitPlan) -> Iterator[tuple[Tier, int]]:
        """(tier, bytes) of each extent and each block of the arena that one unit takes, slots apart."""
        yield Tier.HOST, unit.memory_numel(unit.parameter_tiers) * unit.spec.dtype.itemsize
        for tier, start, stop in unit.stored(unit.parameter_tiers):
            yield tier, (stop - start) * unit.spec.dtype.itemsize
        if unit.trainable:
            yield Tier.HOST, unit.memory_numel(unit.gradient_tiers) * self.gradient_itemsize
        for tile, record, _, gradient, state in unit.rows():
            if record is not None:
                yield state, record.nbytes
            if tile.trainable and gradient.stored:
                yield gradient, tile.numel * self.gradient_itemsize


class Shards:
    """Shards that are cut into tiles once and can be placed many times. Those that are alike are counted together.

    `shards`: each with how many of its kind there are in a row. The rest is as `plan_store` has it.
    """

    def __init__(
        self,
        shards: Iterable[tuple[ShardSpec, int]],
        step: UpdateStep,
        *,
        tile_numel: int,
        prefetch_bytes: int = 0,
        shard_count: int = 1,
        alignment: int = PAGE_BYTES,
        landing_dtype: torch.dtype | None = None,
        gradient_itemsize: int = FP32_BYTES,
        tiers: tuple[Tier, ...] = TIERS,
    ) -> None:
        check_tile_numel(tile_numel)
        self._step, self._tile_numel, self._alignment = step, tile_numel, max(alignment, PAGE_BYTES)
        self._prefetch_bytes, self._gradient_itemsize = prefetch_bytes // max(1, shard_count), gradient_itemsize
        self._landing_dtype, self._discrete = landing_dtype, landing_dtype is not None
        self._tiers = tiers
        self._records: dict[tuple[int, torch.dtype], Record] = {}
        self.cut: list[UnitRun] = []
        self.numel = self.trained_numel = 0
        for number, (spec, count) in enumerate(shards):
            unit = UnitPlan(spec, cut(number, spec, tile_numel), (), (), (), (), self._discrete)
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
        """The plan of these placements, by kind. Raises PlacementError for one that cannot be, or too few `slots`."""
        if slots is not None and (isinstance(slots, bool) or not isinstance(slots, int) or slots < MINIMUM_SLOTS):
            raise PlacementError(f"slots={slots!r}: at least {MINIMUM_SLOTS} (a read, an update and a write at a time)")
        fractions = [shares(placements[kind], kind, self._tiers) for kind in STATE_KINDS]
        bounds = [[bound for bound in accumulate(kind.values()) if 0 < bound < 1] for kind in fractions]
        runs = [placed for run in self.cut for placed in self._placed(run, fractions, bounds)]
        states, gradients = Counter[int](), Counter[int]()  # stored tiles by the bytes that they take of a slot
        for run in runs:
            for tile, record, _, gradient, state in run.unit.rows():
                if record is not None and state.stored:
                    states[record.nbytes] += run.count
                if tile.trainable and gradient.stored:
                    gradients[round_up(tile.numel * self._gradient_itemsize, self._alignment)] += run.count
        units = [run.unit for run in runs for _ in range(run.count)]
        own, shared, largest = slots_of_units(units, self._prefetch_bytes)
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
        )
        return plan if self._landing_dtype is None else _discrete(plan, self._landing_dtype, self._step)

    def _placed(
        self, run: UnitRun, fractions: Sequence[Mapping[Tier, float]], bounds: Sequence[Sequence[float]]
    ) -> Iterator[UnitRun]:
        """Parts of the run in which no placement changes but in a part of one unit, with their tiers and records.

        A share of the parameters is one of all elements; of gradients and states it is one of the trained elements.
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
            if self._discrete and spec.trained and states[:1] == (Tier.DEVICE,):
                parameters = states  # a share of all elements may end before the same share of the trained ones
            records = tuple(self._record(tile, spec.dtype, tier) for tile, tier in zip(tiles, states, strict=True))
            unit = UnitPlan(spec, tiles, records, parameters, gradients, states, self._discrete)
            yield UnitRun(unit, stop - first, run.start + before, run.trained_start + before * spec.trained)

    def _tiers_of(
        self, tiles: Sequence[Tile], start: int, numel: int, fractions: Mapping[Tier, float]
    ) -> tuple[Tier, ...]:
        """The tier of each tile of a unit with `start` of `numel` elements before it.

        A discrete device has whole units: those whose middle is within its fraction. The others begin behind it.
        """
        least = 0.0
        if self._discrete and tiles:
            if tier_at(min(1.0, (start + tiles[-1].stop / 2) / numel), fractions) == Tier.DEVICE:
                return (Tier.DEVICE,) * len(tiles)
            least = fractions[Tier.DEVICE]
        middles = ((start + tile.start + tile.numel / 2) / numel for tile in tiles)
        return tuple(tier_at(min(1.0, max(least, middle)), fractions) for middle in middles)

    def _record(self, tile: Tile, dtype: torch.dtype, state: Tier) -> Record | None:
        """None where no element has a state, or a discrete device keeps it."""
        if not tile.trainable or (self._discrete and state == Tier.DEVICE):
            return None
        key = (tile.numel, dtype)
        if key not in self._records:
            self._records[key] = record_of(self._step, *key, self._alignment)
        return self._records[key] if self._records[key].nbytes else None


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
    gradient_itemsize: int = FP32_BYTES,
    tiers: tuple[Tier, ...] = TIERS,
) -> StorePlan:
    """Cut, place and count. `step` is bound already.

    `slots`: of states and of gradients each; None: a quarter of what is stored, at least 3, fewer where `host_bytes`
    is short. `landing_dtype`: with a discrete device, the reduce dtype of what comes from it.
    `gradient_itemsize`: bytes that are kept of an element (`ElementBytes.gradient`). `tiers`: all there are, fast to
    slow. Raises PlacementError, or BudgetError when `host_bytes` is too small even with 3 slots.
    """
    if landing_dtype is not None:
        check_device_shares(parameters, gradients, optimizer)
    shards = Shards(
        ((spec, 1) for spec in specs),
        step,
        tile_numel=tile_numel,
        prefetch_bytes=prefetch_bytes,
        shard_count=shard_count,
        alignment=alignment,
        landing_dtype=landing_dtype,
        gradient_itemsize=gradient_itemsize,
        tiers=tiers,
    )
    plan = shards.place({"parameters": parameters, "gradients": gradients, "optimizer": optimizer}, slots)
    return plan if host_bytes is None else _fit(plan, host_bytes, fixed=slots is not None)


def check_device_shares(parameters: Placement, gradients: Placement, optimizer: Placement) -> None:
    """Raises PlacementError unless units whose states are on a discrete device have everything else there too."""
    states = device_share(optimizer)
    if not math.isclose(device_share(gradients), states, abs_tol=1e-6):
        raise PlacementError(
            f"gradients={gradients!r} and optimizer={optimizer!r}: on a discrete device a unit's gradient is where its "
            f'states are; give both the same share of "device" ({states:g})'
        )
    if device_share(parameters) < states - 1e-6:
        raise PlacementError(
            f"parameters={parameters!r} and optimizer={optimizer!r}: states on the device need their parameters there; "
            f'give parameters at least {states:g} of "device"'
        )


def _discrete(plan: StorePlan, dtype: torch.dtype, step: UpdateStep) -> StorePlan:
    """With what a discrete device needs: where gradients pass through, where the host updates its parameters."""
    units = [run.unit for run in plan.runs]
    below = [unit for unit in units if unit.trainable and not unit.whole]
    tile = max((tile.numel for unit in below for tile in unit.tiles), default=0)
    homes = [tile.numel * unit.spec.dtype.itemsize for unit in units if unit.home for tile in unit.tiles]
    largest = max((unit.spec.numel for unit in below if not unit.spec.encloses), default=0)
    # A unit that is open during the whole backward would hold a buffer that the others take turns with. A small one,
    # such as a final norm, may be.
    small = min(largest * dtype.itemsize // 16, SMALL_UNIT_BYTES)
    own = {id(unit) for unit in below if unit.spec.encloses or unit.spec.numel * dtype.itemsize <= small}
    return replace(
        plan,
        landing_numel=largest,
        landing_itemsize=dtype.itemsize,
        own_landings=tuple(i for i, unit in enumerate(plan.units) if id(unit) in own),
        staging_slots=STAGING_SLOTS if below else 0,
        staging_slot_bytes=round_up(tile * dtype.itemsize, PAGE_BYTES),
        state_values=len(step.state_names()),
        mirror_slots=MIRROR_SLOTS if homes else 0,
        mirror_slot_bytes=round_up(max(homes, default=0), PAGE_BYTES),
    )


def slots_of_units(units: Sequence[UnitPlan], prefetch_bytes: int) -> tuple[tuple[int, ...], int, int]:
    """Streamed units with a slot of their own; how many slots the others share, those prefetched and two; their bytes.

    A final norm open during the whole forward would otherwise take a slot as large as a block's, and so would each
    block's adapters, while an embedding would make every slot as large as itself. Units with a slot of their own are
    the smallest ones, if together they cost no more than one shared slot, and, at either end of the sizes, those that
    make the slots take less memory in all. Such a unit is read once. Where modules open several units at once, those in
    use take as many slots for each.
    """
    sizes = sorted((unit.parameter_bytes, i) for i, unit in enumerate(units) if unit.streamed)
    ends = [0, *accumulate(size for size, _ in sizes)]
    largest, small = (sizes[-1][0] if sizes else 0), 0
    while small < len(sizes) and sizes[small][0] <= min(largest // 16, SMALL_UNIT_BYTES) and ends[small + 1] <= largest:
        small += 1
    edges = [k for k in range(1, len(sizes)) if sizes[k - 1][0] < sizes[k][0]]
    firsts = [small, *(k for k in edges if k > small and sizes[k - 1][0] <= largest // 16)]
    lasts = [len(sizes), *(k for k in edges if len(sizes) - k <= LARGE_UNITS)]
    best = None
    for first, last in product(firsts, lasts):
        if first <= last:
            ahead = bisect_right(ends, ends[first] + prefetch_bytes, first, last + 1) - 1 - first
            beside = Counter(units[i].spec.beside for _, i in sizes[first:last])
            del beside[None]
            at_once = max(beside.values(), default=1)
            count, nbytes = (
                min(last - first, max(at_once, ahead) + 2 * at_once),
                sizes[last - 1][0] if first < last else 0,
            )
            total = ends[first] + count * nbytes + ends[-1] - ends[last]
            if best is None or total < best[0]:
                best = total, first, last, count, nbytes
    assert best is not None
    _, first, last, count, nbytes = best
    return tuple(sorted(i for _, i in (*sizes[:first], *sizes[last:]))), count, nbytes


def resident_slots(slots: int, tiles: int) -> int:
    """Slots whose tile stays from one update to the next, of `slots` through which so many tiles pass.

    The others are PASSING_SLOTS: with fewer, reads would not run far enough ahead.
    """
    return slots if slots >= tiles else max(0, slots - PASSING_SLOTS)


def _slots(tiles: Counter[int], wanted: int | None) -> int:
    """A quarter of the bytes, at least 3, never more than there are tiles. `tiles`: how many there are of each size."""
    if not tiles:
        return 0
    quarter = -(-sum(size * count for size, count in tiles.items()) // (4 * max(tiles)))
    return min(tiles.total(), max(MINIMUM_SLOTS, quarter if wanted is None else wanted))


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
        states, gradients = plan.state_slots, plan.gradient_slots
        if gradients > smallest.gradient_slots and (gradients > states or states == smallest.state_slots):
            plan = replace(plan, gradient_slots=gradients - 1)
        else:
            plan = replace(plan, state_slots=states - 1)
    return plan

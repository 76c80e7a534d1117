"""Lists the memory that a placement reserves: tiles with their tiers, rows of bytes by kind and place. Pure.

Owns `StorePlan`, whose rows `TieredStore.attach` reserves and `planning` sums, so that a plan and the run cannot
disagree. Not here: cutting tiles and counting slots (in store_plan.py), bytes of an element (in zero_core.memory).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..core import FP32_BYTES, ElementBytes, ShardSpec
from ..memory.arena import PAGE_BYTES
from ..tier import TIERS, Tier
from .tile import Record, Tile, round_up

KINDS = ("parameters", "gradients", "optimizer", "buffers")
STATE_KINDS = KINDS[:3]
LANDING_BUFFERS = 2  # on a discrete device: a gradient is written while the one before it is copied to the host
SPILL_SLOTS = 4  # of host memory, each of SPILL_PIECE_BYTES, that activations on nvme travel through
SPILL_PIECE_BYTES = 4 << 20
GRADIENT_BYTES = FP32_BYTES  # of an element of an accumulated gradient


@dataclass(frozen=True)
class PlacedUnit:
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

    def rows(self) -> Iterator[tuple[Tile, Record | None, Tier, Tier, Tier]]:
        """Each tile with its record and the tiers of its parameter, gradient and state."""
        return zip(self.tiles, self.records, self.parameter_tiers, self.gradient_tiers, self.state_tiers, strict=True)

    def stored_records(self) -> list[tuple[Tier, int]]:
        """(tier, bytes) of each record on a stored tier."""
        return [(tier, record.nbytes) for _, record, _, _, tier in self.rows() if record is not None and tier.stored]

    def stored_gradients(self, itemsize: int, alignment: int) -> list[tuple[Tier, int]]:
        """(tier, bytes) of each tile's gradient on a stored tier, with `itemsize` bytes an element."""
        found = ((tier, tile.numel * itemsize) for tile, _, _, tier, _ in self.rows() if tile.trainable and tier.stored)
        return [(tier, round_up(nbytes, alignment)) for tier, nbytes in found]

    def trained_values(self) -> Iterator[tuple[str, Tier, int]]:
        """(kind, tier, bytes) of the parameters and of the states of each tile that is trained."""
        for tile, record, parameter, _, state in self.rows():
            if tile.trainable:
                yield "parameters", parameter, tile.numel * self.spec.dtype.itemsize
                yield "optimizer", state, 0 if record is None else record.nbytes

    def memory_numel(self, tiers: Sequence[Tier]) -> int:
        """The number of elements in host memory. Their tiles come before the stored ones."""
        if self.on_device(tiers):
            return 0
        return sum(tile.numel for tile, tier in zip(self.tiles, tiers, strict=True) if not tier.stored)

    def on_device(self, tiers: Sequence[Tier]) -> bool:
        """Whether the tiles of a kind, whose `tiers` are given, are on a discrete device."""
        return self.discrete and tiers[:1] == (Tier.DEVICE,)

    @property
    def home(self) -> bool:
        """Whether its parameters are on a discrete device and its states, if it has any, are not."""
        return self.on_device(self.parameter_tiers) and not self.whole

    @property
    def whole(self) -> bool:
        """Whether its parameters, gradient and states are all on a discrete device."""
        return self.trainable and self.on_device(self.state_tiers)

    @property
    def streamed(self) -> bool:
        """Whether any of its parameters is stored: then it is used in a unit slot."""
        return any(tier.stored for tier in self.parameter_tiers)

    @property
    def parameter_bytes(self) -> int:
        return self.spec.numel * self.spec.dtype.itemsize


@dataclass(frozen=True)
class UnitRun:
    """`count` consecutive units that are alike, with the plan of the first one.

    start, trained_start: how many elements, and how many trained ones, all shards before it have.
    """

    unit: PlacedUnit
    count: int = 1
    start: int = 0
    trained_start: int = 0


@dataclass(frozen=True)
class Reserved:
    """`count` equal blocks that a store reserves. `place`: the tier that lends them, host memory for the arena.

    parts: the bytes of one block by tier. On a CPU the device tier is host memory too, and may begin a block there.
    """

    kind: str
    place: Tier
    parts: tuple[tuple[Tier, int], ...]
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return sum(nbytes for _, nbytes in self.parts)


@dataclass(frozen=True)
class StorePlan:
    """Everything that a `TieredStore` will reserve."""

    runs: tuple[UnitRun, ...]
    tile_numel: int
    alignment: int
    state_slots: int
    state_slot_bytes: int
    gradient_slots: int
    gradient_slot_bytes: int
    unit_slots: int
    unit_slot_bytes: int
    own_slots: tuple[int, ...]  # streamed units that each have a slot of their own size
    landing_numel: int = 0  # of each of LANDING_BUFFERS on a discrete device; 0: there is none
    landing_itemsize: int = 0
    own_landings: tuple[int, ...] = ()  # units which each have a landing buffer of their own size: see `store_plan`
    state_values: int = 0  # fp32 states per element on a discrete device, besides the master, if it may be cut
    uncut_values: tuple[tuple[object, int], ...] = ()  # the same per uncut parameter, by its group and shape
    mirror_slots: int = 0  # for parameters on a discrete device that the host updates
    mirror_slot_bytes: int = 0
    staging_slots: int = 0
    staging_slot_bytes: int = 0
    gradient_itemsize: int = FP32_BYTES  # bytes of a kept gradient per element
    tiers: tuple[Tier, ...] = TIERS  # fast to slow
    scratch_bytes: int = 0  # host memory beside the arena, while the largest uncut parameter is updated
    device_scratch_bytes: int = 0  # device memory, on a discrete device, which updates all uncut parameters
    durable_on: Tier | None = None  # the tier on which every trained value has two places; None: nothing is durable

    @cached_property
    def units(self) -> tuple[PlacedUnit, ...]:
        """Every unit; those of one run have the first one's plan."""
        return tuple(run.unit for run in self.runs for _ in range(run.count))

    @cached_property
    def reserved(self) -> tuple[Reserved, ...]:
        """Everything, in rows."""
        units = [row for run in self.runs for row in self._of_unit(run.unit, run.count)]
        units += [row for run in self.runs for row in self._durable(run.unit, run.count)]
        own = (round_up(self.units[i].parameter_bytes, self.alignment) for i in self.own_slots)
        slots = (
            (self.state_slots, self.state_slot_bytes),
            (self.gradient_slots, self.gradient_slot_bytes),
            (self.unit_slots, self.unit_slot_bytes),
            (self.staging_slots, self.staging_slot_bytes),
            (self.mirror_slots, self.mirror_slot_bytes),
            *((1, nbytes) for nbytes in own),
        )
        # On a discrete device: buffers from which gradients leave, and one in which a whole unit's is widened to fp32.
        widest = max((run.unit.spec.numel for run in self.runs if run.unit.whole), default=0)
        landings = (
            (LANDING_BUFFERS, self.landing_numel * self.landing_itemsize),
            *((1, self.units[i].spec.numel * self.landing_itemsize) for i in self.own_landings),
            (1, FP32_BYTES * widest if self.landing_itemsize < FP32_BYTES else 0),
        )
        host = [Reserved("buffers", Tier.HOST, ((Tier.HOST, round_up(n, PAGE_BYTES)),), count) for count, n in slots]
        device = [Reserved("buffers", Tier.DEVICE, ((Tier.DEVICE, each),), count) for count, each in landings]
        return (*units, *host, *device)

    def _of_unit(self, unit: PlacedUnit, count: int) -> Iterator[Reserved]:
        """Rows that `count` such units reserve."""
        kinds = (
            ("parameters", unit.parameter_tiers, unit.spec.dtype.itemsize),
            ("gradients", unit.gradient_tiers, self.gradient_itemsize),
        )
        for kind, tiers, itemsize in kinds if unit.trainable else kinds[:1]:
            memory = Counter[Tier]()
            for tile, tier in zip(unit.tiles, tiers, strict=True):
                if not tier.stored:
                    memory[tier] += tile.numel * itemsize
                elif kind == "parameters" or tile.trainable:  # each has an extent of its own
                    yield Reserved(kind, tier, ((tier, tile.numel * itemsize),), count)
            yield Reserved(kind, Tier.DEVICE if unit.on_device(tiers) else Tier.HOST, tuple(memory.items()), count)
        if unit.whole:
            master = ElementBytes(unit.spec.dtype, unit.spec.dtype).master
            nbytes = unit.spec.numel * master + FP32_BYTES * self.device_values(unit)
            yield Reserved("optimizer", Tier.DEVICE, ((Tier.DEVICE, nbytes),), count)
        found = zip(unit.state_tiers, unit.records, strict=True)
        records = Counter((tier, record.nbytes) for tier, record in found if record is not None)
        for part, number in records.items():
            yield Reserved("optimizer", part[0] if part[0].stored else Tier.HOST, (part,), count * number)

    def device_values(self, unit: PlacedUnit) -> int:
        """The number of fp32 states of a whole unit on a discrete device, besides the master."""
        known, uncut = dict(self.uncut_values), [tile for tile in unit.tiles if tile.uncut is not None]
        cuttable = unit.spec.numel - sum(tile.numel for tile in uncut)
        return self.state_values * cuttable + sum(known[t.uncut.group, t.uncut.uncut_shape] for t in uncut if t.uncut)

    def _durable(self, unit: PlacedUnit, count: int) -> Iterator[Reserved]:
        """Rows for `count` such units: the second place of each stored value, and both places of values in memory."""
        if self.durable_on is None:
            return
        for kind, tier, nbytes in unit.trained_values():
            part = (self.durable_on, nbytes)
            yield Reserved(kind, part[0], (part,), count * (1 if tier.stored else 2) * (nbytes > 0))

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes of trained values in memory, which a durable store writes to disk besides the stored ones."""
        values = ((run.count, *value) for run in self.runs for value in run.unit.trained_values())
        return sum(count * nbytes for count, _, tier, nbytes in values if not tier.stored)

    @cached_property
    def held(self) -> Mapping[tuple[str, str], int]:
        """Bytes by tier and kind: "parameters", "gradients", "optimizer" and "buffers" (slots, landing buffers)."""
        held = Counter[tuple[str, str]]()
        for row in self.reserved:
            for tier, nbytes in row.parts:
                held[tier.value, row.kind] += row.count * nbytes
        return {key: nbytes for key, nbytes in held.items() if nbytes}

    def bytes_of(self, tier: str, kind: str) -> int:
        """Bytes of `kind` on `tier`, from `held`. Raises KeyError for unknown names."""
        for name, known in ((kind, KINDS), (tier, self.tiers)):
            if name not in known:
                raise KeyError(f"no figure for {kind!r} on {tier!r}: in place of {name!r} it may be {', '.join(known)}")
        return self.held.get((tier, kind), 0)

    @property
    def offloads(self) -> bool:
        """Whether any tile of any kind is not on the device."""
        return any(tier != Tier.DEVICE for run in self.runs for _, _, *tiers in run.unit.rows() for tier in tiers)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena, rounding of its blocks included."""
        return sum(row.count * round_up(row.nbytes, PAGE_BYTES) for row in self.reserved if row.place == Tier.HOST)

    def extent_bytes(self, tier: str) -> int:
        """Bytes of all extents on a stored tier, rounding included."""
        return sum(row.count * round_up(row.nbytes, self.alignment) for row in self.reserved if row.place == tier)

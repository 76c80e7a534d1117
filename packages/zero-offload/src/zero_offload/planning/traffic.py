"""Counts the bytes that a step moves, over the model's shards as `footprint` cuts them. Integers only: no seconds.

All figures are one rank's. Not here: the bytes that each tier holds (in `StorePlan`, from which the planner and
`TieredStore` both read them), budgets (in budgets.py).

[Note: A step's traffic on a stored tier]
    optimizer    the record of every trained tile is read and written once, unless it stays in a slot
    parameters   read for each forward and each backward (stage 3), trained tiles written once by the update, unless no
                 other unit takes their slot. The units that forward used last are still in the unit slots when backward
                 begins with them. Others may be, too, such as one that was just updated. The update of fp32
                 parameters, which are their own masters, reads them once more where it runs far ahead of the next
                 forward: not counted. All other reads are an upper bound
    gradients    the first that arrives in a step is written in the reduce dtype; each later one reads the sum and
                 writes it in fp32; the update reads the last form. Those that stay in slots are neither written nor
                 read
    setup        writes parameters and records once
A durable store writes every updated tile once a step, also those that stay in slots.
Extents are rounded up to the store's alignment, and so are the bytes moved.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from ..core import FP32_BYTES, ElementBytes, lent_bytes, step_traffic, unit_memory
from ..layout.footprint import StorePlan
from ..layout.store_plan import Shards
from ..layout.tile import round_up
from ..memory.slots import resident_slots
from ..protocols import Field
from ..tier import TIERS, Tier
from ..uncut_step import flop_of
from .model_sizes import ModelSizes, UnitSizes

Held = Mapping[tuple[str, str], int]  # bytes by tier and kind


class AdamLayout:
    """The layout of Adam in fp32, with which a plan counts if it is given no `UpdateStep`. It cannot update."""

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
    rank: int = 0  # the rank whose shards are counted. If shards are equal, rank 0's have no padding, so none is larger
    longest: float = 1.0  # trained elements of the rank with most, as a multiple of the mean
    tile_numel: int = 1 << 22
    alignment: int = 4096  # bytes, of an extent
    accumulate: int = 1  # micro-batches a step
    stage: int = 3
    replicas: int = 1  # ranks that hold the same shard
    ranks_per_machine: int = 1  # of several machines
    secondary_shards: bool = False  # of each unit, over the ranks of a machine
    no_sync: bool = False  # gradients of all micro-batches but the last wait on their rank
    find_unused_parameters: bool = False
    prefetch_bytes: int = 0
    resident_bytes: int = 0
    step: Any = field(default_factory=AdamLayout)  # an UpdateStep, or as much of one as AdamLayout is
    discrete: bool = False  # the device tier is not host memory
    tiers: tuple[Tier, ...] = TIERS  # fast to slow
    durable: bool = False  # each updated tile is written in each step
    update_share: float = 0.0  # of the tiles whose states are not on the discrete device, the part that it updates

    @property
    def ranks(self) -> int:
        return self.shard_count * self.replicas

    @property
    def copies(self) -> bool:
        """Whether a unit in use is a copy of the store's parameters: on a device, gathered, or in a fixed storage."""
        return self.discrete or self.shard_count > 1 or not unit_memory.CAN_SWAP

    @property
    def turns(self) -> bool:
        """Whether copies stay from a forward to its backward."""
        return self.stage == 3 and self.copies and self.prefetch_bytes > 0

    @property
    def keeps_gradients(self) -> bool:
        """Whether whole gradients stay until the step."""
        return self.stage == 1 or self.find_unused_parameters

    @property
    def arriving(self) -> int:
        """Gradients of a unit that reach the store in a step: one where they are added up on their rank before."""
        return 1 if self.ranks > 1 and (self.no_sync or self.keeps_gradients) else self.accumulate

    @property
    def element(self) -> ElementBytes:
        return ElementBytes(self.parameter_dtype, self.reduce_dtype)

    @property
    def gradient_itemsize(self) -> int:
        """Bytes per element of a gradient in the store."""
        return self.element.gradient(self.arriving)


def shards_of(sizes: ModelSizes, shape: Shape) -> Shards:
    """The model's shards on one rank. Consecutive units that are alike are counted together."""

    def alike(unit: UnitSizes) -> object:
        told = (unit.encloses, unit.trained, unit.own_dtype, unit.beside, unit.depth)
        return (*told, *((parameter.numel, parameter.uncut) for parameter in unit.parameters))

    found = []
    owned = zip(sizes.units, sizes.owned(shape.shard_count), strict=True)
    for _, units in groupby(owned, lambda each: (alike(each[0]), each[1])):
        (first, owners), *others = units
        found.append((first.shard(shape.parameter_dtype, shape.shard_count, shape.rank, owners), 1 + len(others)))
    whole = (spec.unit_numel(shape.shard_count) * spec.dtype.itemsize for spec, _ in found)
    return Shards(
        found,
        shape.step,
        tile_numel=shape.tile_numel,
        prefetch_bytes=lent_bytes(whole, shape.prefetch_bytes, shape.resident_bytes, shape.shard_count),
        shard_count=shape.shard_count,
        alignment=shape.alignment,
        landing_dtype=shape.reduce_dtype if shape.discrete else None,
        gradient_itemsize=shape.gradient_itemsize,
        tiers=shape.tiers,
        update_share=shape.update_share,
    )


def loads_of(sizes: ModelSizes, shape: Shape) -> list[int]:
    """The number of elements in each rank's trained shards; 1 for each rank where they are equal."""
    owners, loads = sizes.owned(shape.shard_count), [0] * shape.shard_count
    if not any(owners):
        return [1] * shape.shard_count
    for unit, owned in zip(sizes.units, owners, strict=True):
        if unit.trained:
            spec = unit.shard(shape.parameter_dtype, shape.shard_count, 0, owned)
            numels = spec.numels or [spec.numel] * shape.shard_count
            loads = [load + numel for load, numel in zip(loads, numels, strict=True)]
    return loads


@dataclass(frozen=True)
class Account:
    """Bytes that one step moves. `moved`: by stored tier and purpose; `updated`: memory traffic of the update.

    visits: bytes to a discrete device, and back, of tiles that it updates for another tier. flop: of the matrix
    products in updates of uncut tiles, by the tier of their states (the device, or another) and dtype.
    """

    moved: Mapping[str, Mapping[str, int]]
    updated: Mapping[str, int]  # by where the update runs: device or host
    visits: tuple[int, int] = (0, 0)
    flop: Mapping[tuple[str, torch.dtype], int] = field(default_factory=dict)

    def read_bytes(self, tier: str) -> int:
        return sum(n for purpose, n in self.moved[tier].items() if purpose.endswith("_read"))

    def write_bytes(self, tier: str) -> int:
        return sum(n for purpose, n in self.moved[tier].items() if purpose.endswith("_write"))


def account(plan: StorePlan, shape: Shape, twice: Collection[int] = ()) -> Account:
    """Adds up the bytes that a step with the store's plan moves.

    twice: indices of the units that a backward reads twice, because recomputation uses them first.
    """
    kinds = _of_states(plan, shape), _of_gradients(plan, shape), _of_parameters(plan, shape, twice)
    moved = {}
    for tier in (tier for tier in plan.tiers if tier.stored):
        moved[str(tier)] = {purpose: nbytes[tier] for kind in kinds for purpose, nbytes in kind.items()}
        moved[str(tier)]["setup"] += plan.bytes_of(tier, "optimizer")
    updated, visits, flop = _of_updates(plan, shape)
    return Account(moved, updated, visits, flop)


def _of_states(plan: StorePlan, shape: Shape) -> dict[str, Counter[Tier]]:
    """Bytes by purpose and tier."""
    rows = [(run.count, run.unit.stored_records()) for run in plan.runs]
    read = _passing(rows, plan.state_slots)
    return {"optimizer_read": read, "optimizer_write": _passing(rows, 0) if shape.durable else read}


def _of_gradients(plan: StorePlan, shape: Shape) -> dict[str, Counter[Tier]]:
    """Bytes by purpose and tier. The gradients that come first in backward stay in slots."""

    def passing(itemsize: int) -> Counter[Tier]:
        rows = [(run.count, run.unit.stored_gradients(itemsize, plan.alignment)) for run in reversed(plan.runs)]
        return _passing(rows, 0 if shape.durable else plan.gradient_slots)

    reduced, summed, later = passing(shape.reduce_dtype.itemsize), passing(FP32_BYTES), shape.arriving - 1
    return {
        "accumulate_read": _total((reduced, 1), (summed, later - 1)) if later else Counter(),
        "gradients_read": summed if later else reduced,
        "gradients_write": _total((reduced, 1), (summed, later)),
    }


def _of_parameters(plan: StorePlan, shape: Shape, twice: Collection[int]) -> dict[str, Counter[Tier]]:
    """Bytes by purpose and tier."""
    own, first = set(plan.own_slots), 0
    fit = sum(run.count for run in plan.runs if run.unit.streamed) - len(own) <= plan.unit_slots
    setup, forward, again, updated, around = (Counter[Tier]() for _ in range(5))  # around: copies stay for backward
    sharing: list[tuple[Counter[Tier], int]] = []  # extents of a unit that shares slots, and how many are like it
    for run in plan.runs:
        unit, count, size = run.unit, run.count, run.unit.spec.dtype.itemsize
        passed = [i for i in range(first, first + count) if i not in own and not fit]  # the others stay in their slots
        streamed, written = len(passed), count if shape.durable else len(passed)
        first += count
        stored = Counter[Tier]()
        for tile, _, tier, _, _ in unit.rows():
            nbytes = round_up(tile.numel * size, plan.alignment)
            updated[tier] += written * nbytes * tile.trainable
            if tier.stored:
                stored[tier] += nbytes
        for tier, extent in stored.items():
            setup[tier] += written * extent
            forward[tier] += streamed * extent
            again[tier] += sum(i in twice for i in passed) * extent
        if stored and streamed and unit.spec.encloses and shape.turns:
            around.update(stored)
        elif stored and streamed:
            sharing.append((stored, streamed))
    # Where units are copied out of their slots and no copies stay, one that is read ahead has taken a slot.
    taken = shape.copies and not shape.turns
    last = around + _least(sharing, max(0, plan.unit_slots - taken) if shape.stage == 3 else 0)
    return {
        "setup": setup,
        "forward_read": _total((forward, shape.accumulate)),
        "backward_read": _total(*((each, shape.accumulate) for each in (forward, again)), (last, -shape.accumulate)),
        "parameters_write": updated,
    }


def _of_updates(
    plan: StorePlan, shape: Shape
) -> tuple[dict[str, int], tuple[int, int], dict[tuple[str, torch.dtype], int]]:
    """The fields `updated`, `visits` and `flop` of `Account`."""
    updated, flop, there, back = Counter[str](), Counter[tuple[str, torch.dtype]](), 0, 0
    on_device = step_traffic(shape.element, shape.gradient_itemsize)
    for run in plan.runs:
        unit, count, size = run.unit, run.count, run.unit.spec.dtype.itemsize
        if unit.whole:
            read_and_written = 2 * FP32_BYTES * plan.device_values(unit)
            updated[Tier.DEVICE] += count * (unit.spec.numel * on_device + read_and_written)
        for tile, record, _, _, state in unit.rows():
            where = Tier.DEVICE if state == Tier.DEVICE else Tier.HOST
            if tile.uncut is not None:
                products, dtype = flop_of(shape.step, tile.uncut)
                flop[where, dtype] += count * products
            if record is not None and tile.visits:
                back += count * (record.nbytes + tile.numel * size)
                there += count * (record.nbytes + tile.numel * (size + shape.gradient_itemsize))
            elif record is not None:
                updated[where] += count * update_bytes(shape, tile.numel, record.fields)
    return {where: n for where, n in updated.items() if n}, (there, back), {at: n for at, n in flop.items() if n}


def _total(*parts: tuple[Counter[Tier], int]) -> Counter[Tier]:
    """The sum of these counts, each times its factor."""
    found = Counter[Tier]()
    for counts, factor in parts:
        found.update({tier: factor * nbytes for tier, nbytes in counts.items()})
    return found


def _passing(rows: Sequence[tuple[int, Sequence[tuple[Tier, int]]]], slots: int) -> Counter[Tier]:
    """Bytes by tier of the tiles that keep none of the `slots`, which the first tiles keep.

    rows: for each run, how many units it has, and the tier and bytes of each tile of one unit.
    """
    left, found = resident_slots(slots, sum(count * len(of) for count, of in rows)), Counter[Tier]()
    for count, of in rows:
        units, part = divmod(min(left, count * len(of)), max(1, len(of)))
        left -= units * len(of) + part
        for k, (tier, nbytes) in enumerate(of):
            found[tier] += (count - units - (k < part)) * nbytes
    return found


def _least(passing: Sequence[tuple[Counter[Tier], int]], slots: int) -> Counter[Tier]:
    """Bytes by tier of the smallest units, one for each of `slots` slots."""
    found = Counter[Tier]()
    for stored, count in sorted(passing, key=lambda each: each[0].total()):
        found.update({tier: min(count, slots) * extent for tier, extent in stored.items()})
        slots -= min(count, slots)
    return found


def update_bytes(shape: Shape, numel: int, fields: Sequence[Field]) -> int:
    """Memory traffic of one update of `numel` elements: states and parameter read and written, gradient read."""
    states = sum(item.nbytes for item in fields)
    return 2 * states + (2 * shape.parameter_dtype.itemsize + shape.gradient_itemsize) * numel

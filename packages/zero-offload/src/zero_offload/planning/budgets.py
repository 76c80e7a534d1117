"""Counts a rank's bytes with a placement: the store's, the buffers' beside it, and activations'. Refuses plans.

Owns each tier's budget. Integers only.

[Note: Buffers]
    device  zero-core's pool, whose size `zero_core.estimate.pool_simulation` computes. On several ranks it holds
            gathered units and gradients that are being reduced. At stage 1 and under `no_sync` it also holds the whole
            gradients that wait for the step.
            On a discrete device whose store has other tiers, units have memory of their own instead: the unit in use,
            those fetched ahead (in backward, the unit before it is then still open), and those that stay. Gradients
            have two landing buffers: one is written by the backward of a unit while the other is copied to the host.
            The gradient of one parameter, which autograd has just made, comes on top. A unit that computes some rows at
            a time needs the fp32 sum of its gradient, and one parameter's gradient in fp32 before it is added.
    host    slots for states, gradients, units and activations on nvme, staging memory for gradients from a discrete
            device, the rounding of blocks to pages, and scratch memory of the largest uncut parameter's update
Where a rank computes on the CPU and has all shards, a unit's slot becomes its storage: nothing is gathered.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..core import FP32_BYTES, Rehearsal, UnitSize, unit_memory
from ..errors import BudgetError, gib
from ..layout.footprint import SPILL_PIECE_BYTES, SPILL_SLOTS, STATE_KINDS, StorePlan, UnitRun
from ..layout.store_plan import SMALL_UNIT_BYTES
from ..tier import TIERS, Tier
from .batches import Batch
from .hardware import FRAGMENTS, GIB, Hardware
from .model_sizes import ModelSizes
from .traffic import Held, Shape

POLICIES = ("keep", "recompute", *TIERS[1:])
# 16-bit inputs of a unit: of a final norm that computes all rows in fp32, before its backward and during it.
NORM_SAVES, NORM_HOLDS = 2, 12


class PlanError(BudgetError, ValueError):
    """A tier is too small for the bytes that must be on it.

    `tier`, `needed_bytes`, `budget_bytes` and `missing_bytes` are those of the first tier that fails.
    """

    def __init__(self, tier: str, needed_bytes: int, budget_bytes: int, what: str, way_out: str) -> None:
        self.tier, self.needed_bytes, self.budget_bytes = tier, needed_bytes, budget_bytes
        self.missing_bytes = needed_bytes - budget_bytes
        super().__init__(
            f"{tier} tier needs {gib(needed_bytes)} a rank ({what}), budget is {gib(budget_bytes)}: "
            f"{gib(self.missing_bytes)} missing; {way_out}"
        )


@dataclass(frozen=True)
class Budgets:
    """Bytes a rank may use on each tier that has a limit: `rooms`, in the order in which they are checked.

    in_host: by tier, the bytes of host memory that a byte there takes as well.
    """

    rooms: Mapping[str, int]
    in_host: Mapping[str, float]

    @classmethod
    def of_rank(cls, hardware: Hardware, host_bytes: int | None = None) -> Budgets:
        rooms = hardware.rooms | ({} if host_bytes is None else {Tier.HOST: host_bytes})
        in_host = {name: 1 / figures.ratio for name, figures in hardware.tiers.items() if figures.in_host_memory}
        return cls(rooms, in_host | ({Tier.DEVICE: 1.0} if hardware.shares_host else {}))

    @property
    def shared(self) -> bool:
        """Whether the device tier is host memory and counts against that."""
        return Tier.DEVICE not in self.rooms

    def of(self, tier: str) -> int | None:
        """Bytes of `tier`; None for one that has no budget of its own."""
        return self.rooms.get(tier)


def slower(tier: str) -> Tier:
    """The next slower tier, to which a plan moves tiles that do not fit on `tier`."""
    return TIERS[TIERS.index(Tier(tier)) + 1]


def held_back_bytes(plan: StorePlan, shape: Shape) -> int:
    """Bytes of whole gradients that are reduced only at the step: those of stage 1, and of `no_sync`."""
    if shape.ranks == 1 or not (shape.keeps_gradients or (shape.no_sync and shape.accumulate > 1)):
        return 0
    trained = (run for run in plan.runs if run.unit.spec.trained)
    numel = sum(run.count * run.unit.spec.unit_numel(shape.shard_count) for run in trained)
    return numel * shape.element.gradient(shape.accumulate)


def unsharded_bytes(nbytes: Sequence[int], encloses: Sequence[bool], shape: Shape, depths: Sequence[int] = ()) -> int:
    """Most bytes of units in their own memory at once: one in use, those ahead (one at least), those that may stay.

    nbytes: of each whole unit. The units that enclose others, and those as small as a norm, stay open throughout. On
    several ranks one more may not be free yet. depths: see `ShardSpec`; units around a unit stay open beside it.
    """
    passing = [not around and size > SMALL_UNIT_BYTES for around, size in zip(encloses, nbytes, strict=True)]
    large = [size for size, passes in zip(nbytes, passing, strict=True) if passes]
    most = 0
    for order in (large, large[::-1]):
        ends = [0, *accumulate(order)]
        for start in range(len(order)):
            fetched = bisect_right(ends, ends[start + 1] + shape.prefetch_bytes) - 1
            most = max(most, ends[min(len(order), max(start + 2, fetched))] - ends[start])
    most += sum(size for size, passes in zip(nbytes, passing, strict=True) if not passes)
    for depth in range(max(depths, default=0)):
        around = (size for size, at, root in zip(nbytes, depths, encloses, strict=True) if at == depth and not root)
        most += max(around, default=0)
    if shape.shard_count > 1:
        most += max(nbytes, default=0)
    return min(most + shape.resident_bytes, sum(nbytes))


def activation_bytes(
    sizes: ModelSizes, policies: Sequence[str], batch: Batch, *, on_heap: bool = False
) -> dict[str, int]:
    """Bytes by tier of activations kept for backward, and of the one unit whose backward runs.

    `policies`: one a unit; only those of blocks count. The gradient of the logits is freed before a block is
    recomputed. A unit that computes some rows at a time holds, for the other rows, the gradients of its output and of
    its input, and also its input if that came from another tier. One that computes some tokens of a row at a time holds
    the activations of its whole attention: with their gradients while attention's backward runs, without most of them
    while a part of the MLP's runs. A head that computes by rows holds the hidden states and their gradients, and the
    activations of the norm before it: its input, or more where the norm computes all rows.
    on_heap: the device's memory is glibc's heap, see `ModelSizes.kept_bytes_per_token`.
    """
    chosen = Counter(policy for unit, policy in zip(sizes.units, policies, strict=True) if unit.is_block)
    checkpoint, tokens, others = sizes.checkpoint_bytes_per_token, batch.each, batch.each - batch.at_once
    found: dict[str, int] = {tier: checkpoint * tokens * chosen[tier] for tier in TIERS[1:]}
    working = 0
    if chosen["keep"] < chosen.total():
        beside = 3 if any(chosen[tier] for tier in TIERS[1:]) else 2
        working = sizes.working_bytes_per_token * batch.at_once
        if batch.token_parts > 1:
            whole = sizes.whole_bytes_per_token * batch.at_once
            working = max(whole, whole * 9 // 10 + sizes.part_bytes_per_token * batch.inside)
        working += beside * checkpoint * others
        if others and not sizes.norms_by_rows:
            working = max(working, NORM_HOLDS * checkpoint * tokens)
    output = sizes.output_bytes_per_token * tokens
    if sizes.logits_by_rows(policies, batch):
        kept = 1 if sizes.norms_by_rows else NORM_SAVES
        output = sizes.output_bytes_per_token * batch.inside + (2 + kept) * checkpoint * (tokens - batch.inside)
    stored = chosen["keep"] * sizes.kept_bytes_per_token(on_heap) + chosen["recompute"] * checkpoint
    found[Tier.DEVICE] = stored * tokens + max(working, output)
    return found


class Holding:
    """The inputs that no placement changes: the model, the `policies` of its units, and its shards in runs."""

    def __init__(
        self, sizes: ModelSizes, shape: Shape, batch: Batch, policies: Sequence[str], cut: Sequence[UnitRun]
    ) -> None:
        self.sizes, self.shape, self.policies = sizes, shape, policies
        self._batch, self._cut = batch, cut
        self._pooled: dict[tuple[bool, int], int] = {}

    def held(self, plan: StorePlan) -> Held:
        """The rank's bytes by tier and kind: of the store's `plan`, of the buffers beside it, and of activations."""
        sizes, shape, element = self.sizes, self.shape, self.shape.element
        held, units, offloads = dict(plan.held), [run.unit for run in plan.runs], plan.offloads
        swaps_in = offloads and shape.discrete
        own = swaps_in or not unit_memory.CAN_SWAP  # units have memory of their own
        whole = 0  # bytes of parameters that stages 0 to 2 keep unsharded, where that is not the store's own memory
        if shape.stage < 3 and (shape.shard_count > 1 or own):
            whole = sum(run.count * self._unit_bytes(run) for run in plan.runs)
            # zero-core's own store rounds a 16-bit shard from the master where the whole unit stays.
            rounds = shape.discrete and not offloads and element.master
            rounded = (run for run in plan.runs if rounds and run.unit.trainable)
            held[Tier.DEVICE, "parameters"] = (
                whole
                + plan.bytes_of(Tier.DEVICE, "parameters")
                - sum(run.count * run.unit.parameter_bytes for run in rounded)
            )
        pooled = self._pool(plan, own) - (0 if own else whole)
        device = plan.bytes_of(Tier.DEVICE, "buffers")
        trained = [unit for unit in sizes.units if unit.trained]
        if shape.discrete and any(tier != Tier.DEVICE for unit in units for tier in unit.gradient_tiers):
            made = max((p.numel for unit in trained for p in unit.parameters), default=0)
            device += pooled + made * shape.parameter_dtype.itemsize
            if shape.arriving > 1:  # a gradient that will be added to a sum on the device has memory beside the sum
                whole_units = (unit.spec.unit_numel(shape.shard_count) for unit in units if unit.whole)
                device += max(whole_units, default=0) * element.gradient(1)
        else:
            device += max(pooled, max((unit.numel for unit in trained), default=0) * element.gradient(1))
        if shape.stage == 3 and own:
            nbytes = [unit.nbytes(shape.parameter_dtype) for unit in sizes.units]
            depths = [unit.depth for unit in sizes.units]
            device += unsharded_bytes(nbytes, [unit.encloses for unit in sizes.units], shape, depths)
        if not offloads and not shape.discrete:  # zero-core's own store widens a gradient
            device += element.widened * max((unit.spec.numel for unit in units if unit.trainable), default=0)
        if summed := sizes.summed(self.policies, self._batch):
            widens = shape.parameter_dtype.itemsize < FP32_BYTES
            device += (max(map(sum, summed)) + widens * max(map(max, summed))) * FP32_BYTES
        if shape.secondary_shards:
            device += sum(run.count * (self._unit_bytes(run) // shape.ranks_per_machine) for run in plan.runs)
        device += plan.device_scratch_bytes
        memory = (Tier.HOST,) if shape.discrete else (Tier.HOST, Tier.DEVICE)
        states = sum(plan.bytes_of(tier, kind) for tier in memory for kind in STATE_KINDS)
        spill = SPILL_SLOTS * SPILL_PIECE_BYTES if TIERS[-1] in self.policies else 0  # slots of checkpoints on nvme
        held[Tier.DEVICE, "buffers"] = device
        held[Tier.HOST, "buffers"] = plan.arena_bytes - states + spill + plan.scratch_bytes
        activations = activation_bytes(sizes, self.policies, self._batch, on_heap=not shape.discrete)
        return held | {(tier, "activations"): nbytes for tier, nbytes in activations.items()}

    def _pool(self, plan: StorePlan, own: bool) -> int:
        """Bytes of zero-core's pool. own: units have memory of their own."""
        shape = self.shape
        tiers = {tier for run in plan.runs for tier in run.unit.gradient_tiers}
        if shape.discrete and tiers - {Tier.DEVICE}:
            lends = shape.accumulate  # every gradient has a landing buffer
        elif shape.discrete or not plan.offloads:  # zero-core's own store keeps a sum outside of the memory it lends
            lends = int(shape.arriving == 1 or shape.reduce_dtype.itemsize == FP32_BYTES)
        else:
            lends = int(not any(tier.stored for tier in tiers))
        if (own, lends) not in self._pooled:
            units = []
            for run in self._cut:
                spec = run.unit.spec
                numels = None if spec.numels is None else (spec.numel, max(spec.numels))
                told = spec.trained, spec.encloses, spec.depth, numels, spec.trained and not run.unit.trainable
                size = UnitSize(spec.unit_numel(shape.shard_count), spec.dtype.itemsize, *told)
                units += [size] * min(run.count, self._most_in_a_row(size))
            self._pooled[own, lends] = Rehearsal(
                units,
                1 if shape.keeps_gradients else shape.stage,
                shard_count=shape.shard_count,
                replicas=shape.replicas,
                reduce_itemsize=shape.reduce_dtype.itemsize,
                accumulate=shape.accumulate,
                no_sync=shape.no_sync,
                prefetch_bytes=shape.prefetch_bytes,
                resident_bytes=shape.resident_bytes,
                lends=lends,
                gathers=not own,
                exchanges=not shape.discrete,
            ).pooled_bytes()
        return self._pooled[own, lends]

    def _unit_bytes(self, run: UnitRun) -> int:
        """Bytes of a whole unit's parameters."""
        return run.unit.spec.unit_numel(self.shape.shard_count) * run.unit.spec.dtype.itemsize

    def _most_in_a_row(self, size: UnitSize) -> int:
        """How many consecutive units of one size to rehearse: beyond it the pool grows only if units are kept."""
        shape = self.shape
        if shape.stage < 3 or shape.no_sync:
            return sys.maxsize
        return 8 + (shape.prefetch_bytes + shape.resident_bytes) // max(1, size.numel * size.itemsize)


def needed_bytes(held: Held, budgets: Budgets) -> dict[str, int]:
    """Bytes on each tier that has a budget; the device's count as host where they share memory."""
    return {tier: sum(_kinds(tier, held, budgets).values()) for tier in budgets.rooms}


def _kinds(tier: str, held: Held, budgets: Budgets) -> Counter[str]:
    """Bytes by kind that count against the budget of `tier`."""
    counted = {tier: 1.0} | (dict(budgets.in_host) if tier == Tier.HOST else {})
    kinds = Counter[str]()
    for (where, kind), nbytes in held.items():
        kinds[kind] += int(nbytes * counted.get(where, 0))
    return kinds


def check(held: Held, held_back: int, budgets: Budgets, hardware: Hardware, shape: Shape) -> None:
    """Raises `PlanError` for the first tier (device, host, nvme, then the others) that is too small.

    Its text names arguments of `plan` and fields of `hardware`.
    """
    for tier, needed in needed_bytes(held, budgets).items():
        budget = budgets.rooms[tier]
        if needed > budget:
            kinds, on_device = _kinds(tier, held, budgets), tier == (Tier.HOST if budgets.shared else Tier.DEVICE)
            waits = "" if not (held_back and on_device) else "stage=2" if shape.stage == 1 else "no_sync=False"
            if waits and shape.find_unused_parameters:
                waits = "stage=2 without find_unused_parameters"
            swaps = any(nbytes for (where, _), nbytes in held.items() if Tier(where).stored)
            ways = _ways_out(tier, kinds, waits, swaps, budgets, hardware)
            raise PlanError(tier, needed, budget, contents(kinds), ways)


def moved(kind: str, slower: str, held: Mapping[str, int], *, discrete: bool) -> tuple[tuple[str, ...], str]:
    """The kinds that leave a tier with `kind`, and the arguments that place them on a `slower` one.

    held: bytes there by kind. On a discrete device a unit's gradient is on the tier of its states, and states are there
    only with their parameters.
    """
    states = ("optimizer", "gradients")
    together: tuple[str, ...] = (kind,)
    if discrete and any(held.get(each) for each in states):
        together = states if kind in states else (kind, *states)
    return together, " and ".join(f'{each}="{slower}"' for each in together)


def contents(kinds: Mapping[str, int]) -> str:
    """Returns "optimizer 12.0 GiB, buffers 1.0 GiB", the largest first, from bytes by kind."""
    ranked = sorted(((nbytes, kind) for kind, nbytes in kinds.items() if nbytes), reverse=True)
    return ", ".join(f"{kind} {gib(nbytes)}" for nbytes, kind in ranked)


def _ways_out(
    tier: str, kinds: Mapping[str, int], reducing: str, swaps: bool, budgets: Budgets, hardware: Hardware
) -> str:
    """Remedies, the nearest first. `kinds`: bytes that `tier` would hold, by kind.

    reducing: the argument that reduces every micro-batch; empty: no gradient waits. swaps: tiles pass through
    slots on the host.
    """
    if Tier(tier).stored:
        return hardware.more_room(tier)
    if not getattr(hardware, f"{tier}_bytes"):
        ranks, reserved, grows = hardware.ranks_per_node, hardware.host_reserved_gib, 0.0
        if tier == Tier.DEVICE:  # more is reserved of a larger device
            ranks, reserved = 1, hardware.reserved_gib
            grows = FRAGMENTS if hardware.device_reserved_gib is None else 0.0
        needed = reserved - grows * hardware.device_gib + sum(kinds.values()) / GIB
        least = math.ceil(100 * ranks * needed / (1 - grows)) / 100
        return (
            f"libraries take hardware.{tier}_reserved_gib={reserved:.3g} for each rank, so hardware.{tier}_gib="
            f"{getattr(hardware, f'{tier}_gib'):g} leaves nothing; set hardware.{tier}_gib={least:g} or more"
        )
    next_tier = slower(tier)
    largest = max(STATE_KINDS, key=lambda kind: kinds[kind])
    ways = []
    if kinds[largest]:
        needs = f" and hardware.{next_tier}_gib above 0"
        arguments = moved(largest, next_tier, kinds, discrete=tier == Tier.DEVICE)[1]
        ways.append(arguments + (needs if next_tier.stored and not budgets.of(next_tier) else ""))
    if kinds["activations"]:
        ways.append("fewer tokens a micro-batch")
    if reducing:
        ways.append(f"{reducing} (reduces gradients after each micro-batch)")
    if kinds["buffers"] and (tier == Tier.DEVICE or swaps):
        ways.append("smaller units (TiledLinear)" if tier == Tier.DEVICE else "fewer slots (slots=...)")
    ways.append(f"more ranks (now {hardware.ranks}) with stage=3")
    allowed = ""
    if tier == Tier.HOST and sum(kinds.values()) <= hardware.host_bytes:  # the caller allows less than the machine has
        allowed = f"; or set host_bytes={sum(kinds.values())}, which the host has"
    return f"save memory with {', or '.join(ways)}{allowed}"

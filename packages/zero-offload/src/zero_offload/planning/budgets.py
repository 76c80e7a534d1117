"""What each tier may hold, the memory that is nobody's state (buffers, activations), and the refusals.

Integers only. Owns `Budgets`, `PlanError` and the sum of what a rank holds; the store's part of it is a `StorePlan`'s.

[Note: Buffers]
    device  zero-core's pool: on several ranks units that are gathered and gradients on their way
            (`zero_core.runtime.rehearsal` has its size), and whole gradients that wait for the step, at stage 1 and
            under `no_sync`.
            On a device apart with a store below it units have memory of their own instead: the one in use with those
            fetched ahead (in backward the one before it is still open then), and those that stay. There the gradient of
            the unit whose backward runs is one of two landing buffers, as the one before it is on its way to the host;
            and autograd has just made a parameter's.
            Parameters that are not sharded: integer and quantised ones
    host    slots for states, gradients, units and activations that lie on nvme, what gradients pass through on the way
            from a device apart, and the rounding of blocks to pages
Where a rank computes on the CPU and has all shards, a unit's slot becomes its storage: nothing is gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import BudgetError, gib
from ..tier import Tier
from ..tiles.footprint import SMALL_UNIT_BYTES, SPILL_PIECE_BYTES, SPILL_SLOTS, STATE_KINDS, StorePlan
from .accounting import TIERS, Held, Shape
from .hardware import Hardware
from .sizes import ModelSizes

POLICIES = ("keep", "recompute", "host", "nvme")


class PlanError(BudgetError, ValueError):
    """A tier is too small for what must lie on it.

    `tier`, `needed_bytes`, `budget_bytes` and `missing_bytes` are those of the first tier that fails.
    """

    def __init__(self, tier: str, needed_bytes: int, budget_bytes: int, what: str, way_out: str) -> None:
        self.tier = tier
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.missing_bytes = needed_bytes - budget_bytes
        super().__init__(
            f"{tier} tier needs {gib(needed_bytes)} a rank ({what}), budget is {gib(budget_bytes)}: "
            f"{gib(self.missing_bytes)} missing; {way_out}"
        )


@dataclass(frozen=True)
class Budgets:
    """Bytes a rank may use on each tier. `shared`: the device tier is host memory and counts against `host`."""

    device: int
    host: int
    nvme: int
    shared: bool

    @classmethod
    def of_rank(cls, hardware: Hardware, host_bytes: int | None = None) -> Budgets:
        host = hardware.host_bytes if host_bytes is None else host_bytes
        return cls(hardware.device_bytes, host, hardware.nvme_bytes, hardware.shares_host)

    def of(self, tier: str) -> int | None:
        """Bytes of `tier`; None for a device that has no budget of its own."""
        if tier == "device" and self.shared:
            return None
        return int(getattr(self, tier))


def held_bytes(
    sizes: ModelSizes,
    shape: Shape,
    plan: StorePlan,
    *,
    pooled: int,
    whole: int,
    tokens: int,
    activations: Sequence[str],
) -> Held:
    """What one rank holds: the store's `plan`, the buffers beside it, and activations.

    `pooled`: bytes of zero-core's pool, but for whole parameters. `whole`: of parameters that stages 0 to 2 keep
    unsharded. `tokens`: of a micro-batch.
    """
    held = dict(plan.held)
    element, units = shape.element, [run.unit for run in plan.runs]
    device = plan.bytes_of("device", "buffers") + sum(sizes.not_sharded.values())
    trained = [unit for unit in sizes.units if any(p.trained for p in unit.parameters)]
    if shape.apart and any(tier != Tier.DEVICE for unit in units for tier in unit.gradient_tiers):
        made = max((p.numel for unit in trained for p in unit.parameters if p.trained), default=0)
        device += pooled + made * shape.parameter_dtype.itemsize
        if shape.arriving > 1:  # what is added to a sum on the device comes in other memory than the sum's
            whole_units = (u.spec.numel for u in units if u.trainable and u.whole_numel == u.spec.numel)
            device += max(whole_units, default=0) * shape.shard_count * element.gradient(1)
    else:
        device += max(pooled, max((unit.numel for unit in trained), default=0) * element.gradient(1))
    if shape.stage == 3 and plan.below and shape.apart:
        device += unsharded_bytes(sizes, shape)
    if not plan.below:  # zero-core's own store widens a gradient, and has a master of what is frozen
        if not shape.apart:
            device += element.widened * max((unit.spec.numel for unit in units), default=0)
        device += element.master * sum(run.count * run.unit.spec.numel for run in plan.runs if not run.unit.trainable)
    memory = ("host",) if shape.apart else ("host", "device")
    states = sum(plan.bytes_of(tier, kind) for tier in memory for kind in STATE_KINDS)
    spill = SPILL_SLOTS * SPILL_PIECE_BYTES if "nvme" in activations else 0  # what checkpoints travel through
    held |= {("device", "buffers"): device, ("host", "buffers"): plan.arena_bytes - states + spill}
    if whole:
        # zero-core's own store rounds a 16-bit shard from the master where the whole unit stays.
        kept = plan.below or not shape.apart or not element.master
        held["device", "parameters"] = whole + (plan.bytes_of("device", "parameters") if kept else 0)
    activated = activation_bytes(sizes, activations, tokens)
    return held | {(tier, "activations"): nbytes for tier, nbytes in activated.items()}


def held_back_bytes(plan: StorePlan, shape: Shape) -> int:
    """Bytes of whole gradients that no rank has reduced before the step: those of stage 1, and of `no_sync`."""
    if shape.ranks == 1 or not (shape.stage == 1 or (shape.no_sync and shape.accumulate > 1)):
        return 0
    numel = sum(run.count * run.unit.spec.numel for run in plan.runs if run.unit.trainable)
    return numel * shape.shard_count * shape.element.gradient(shape.accumulate)


def unsharded_bytes(sizes: ModelSizes, shape: Shape) -> int:
    """Most bytes of units in memory of their own at once: one in use, those ahead (one at least), those that may stay.

    The root, and a unit as small as a norm, are open all along. On several ranks one more may not be free yet.
    """
    itemsize = shape.parameter_dtype.itemsize
    nbytes = [unit.numel * itemsize for unit in sizes.units]
    passing = [not unit.encloses and size > SMALL_UNIT_BYTES for unit, size in zip(sizes.units, nbytes, strict=True)]
    large = [size for size, passes in zip(nbytes, passing, strict=True) if passes]
    most = 0
    for order in (large, large[::-1]):
        stop, ahead = 0, 0  # `ahead`: of the units after `start` up to `stop`
        for start, size in enumerate(order):
            if stop <= start:
                stop, ahead = start + 1, 0
            else:
                ahead -= size
            while stop < len(order) and (stop == start + 1 or ahead + order[stop] <= shape.prefetch_bytes):
                ahead += order[stop]
                stop += 1
            most = max(most, size + ahead)
    most += sum(size for size, passes in zip(nbytes, passing, strict=True) if not passes)
    if shape.shard_count > 1:
        most += max(nbytes, default=0)
    return min(most + shape.resident_bytes, sum(nbytes))


def activation_bytes(sizes: ModelSizes, policies: Sequence[str], tokens: int) -> dict[str, int]:
    """Bytes by tier of what forward keeps for backward, and of the one unit whose backward runs.

    `policies`: one a unit; only those of blocks count. `tokens`: of one micro-batch. The gradient of the logits is gone
    before a block is recomputed.
    """
    chosen = Counter(policy for unit, policy in zip(sizes.units, policies, strict=True) if unit.is_block)
    found: dict[str, int] = {tier: sizes.checkpoint_bytes_per_token * tokens * chosen[tier] for tier in TIERS[1:]}
    working = sizes.working_bytes_per_token if chosen["keep"] < chosen.total() else 0
    found["device"] = tokens * (
        chosen["keep"] * sizes.saved_bytes_per_token
        + chosen["recompute"] * sizes.checkpoint_bytes_per_token
        + max(working, sizes.output_bytes_per_token)
    )
    return found


def needed_bytes(held: Held, budgets: Budgets) -> dict[str, int]:
    """Bytes by tier that has a budget, device counted as host where they share."""
    totals: dict[str, int] = dict.fromkeys(TIERS, 0)
    for (tier, _), nbytes in held.items():
        totals[tier] += nbytes
    if budgets.shared:
        totals["host"] += totals.pop("device")
    return totals


def check(held: Held, held_back: int, budgets: Budgets, hardware: Hardware) -> None:
    """Raise `PlanError` for the first tier (device, host, nvme) that is too small."""
    for tier, needed in needed_bytes(held, budgets).items():
        budget = budgets.of(tier)
        assert budget is not None
        if needed > budget:
            tiers = ("device", "host") if budgets.shared and tier == "host" else (tier,)
            kinds = Counter[str]()
            for (where, kind), nbytes in held.items():
                kinds[kind] += nbytes if where in tiers else 0
            ranked = sorted(((nbytes, kind) for kind, nbytes in kinds.items() if nbytes), reverse=True)
            what = ", ".join(f"{kind} {gib(nbytes)}" for nbytes, kind in ranked)
            ways = _ways_out(tier, kinds, held_back if "device" in tiers else 0, budgets, hardware)
            raise PlanError(tier, needed, budget, what, ways)


def _ways_out(tier: str, kinds: Mapping[str, int], held_back: int, budgets: Budgets, hardware: Hardware) -> str:
    """What to change, the nearest remedy first. `kinds`: bytes that `tier` would hold."""
    if tier == "nvme":
        return "give more nvme paths or room (hardware.nvme_gib, hardware.nvme_paths), or train on more nodes"
    below = "host" if tier == "device" else "nvme"
    largest = max(STATE_KINDS, key=lambda kind: kinds[kind])
    ways = []
    if kinds[largest] and (below == "host" or budgets.nvme > 0):
        ways.append(f"offload.{largest}={below}")
    elif kinds[largest]:
        ways.append("an nvme tier (offload.nvme_paths, hardware.nvme_gib)")
    if kinds["activations"]:
        ways.append("fewer tokens a micro-batch")
    if held_back:
        ways.append("reducing every micro-batch (zero.no_sync=false, or zero.stage=2 instead of 1)")
    if kinds["buffers"]:
        ways.append("smaller units (TiledLinear)" if tier == "device" else "fewer slots (offload.slots)")
    ways.append(f"more ranks than {hardware.ranks} with zero.stage=3")
    return "lower it with " + ", or ".join(ways)

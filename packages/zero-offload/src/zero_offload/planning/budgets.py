"""What each tier may hold, the memory that is nobody's state (buffers, activations), and the refusals.

Integers only. Owns `Budgets`, `Buffers`, `PlanError`; the states themselves are counted in `accounting`.

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
from dataclasses import dataclass, field

from ..errors import BudgetError, gib
from ..tier import Tier
from ..tiles.footprint import (
    GRADIENT_BYTES,
    LANDING_BUFFERS,
    SMALL_UNIT_BYTES,
    SPILL_PIECE_BYTES,
    SPILL_SLOTS,
    lands_apart,
)
from .accounting import TIERS, Account, Placed, Shape
from .hardware import Hardware
from .sizes import ModelSizes

MASTER_BYTES = 4  # fp32
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


@dataclass(frozen=True)
class Buffers:
    """Bytes that are not states. `held_back`: of `device`, whole gradients that wait on their rank until the step."""

    device: int = 0
    host: int = 0
    held_back: int = 0
    activations: Mapping[str, int] = field(default_factory=dict)

    def on(self, tier: str) -> int:
        return {"device": self.device, "host": self.host}.get(tier, 0)

    @classmethod
    def needed(
        cls,
        sizes: ModelSizes,
        shape: Shape,
        placed: Placed,
        counted: Account,
        *,
        pooled: int,
        tokens: int,
        activations: Sequence[str],
    ) -> Buffers:
        """Of a placement. `pooled`: bytes of zero-core's pool, but for whole parameters. `tokens`: of a micro-batch."""
        below, units = placed.below, [run.unit for run in placed.runs]
        landed = shape.apart and any(tier != Tier.DEVICE for unit in units for tier in unit.gradient_tiers)
        device = _gradient_bytes(sizes, shape, landed, pooled)
        if shape.stage == 3 and below and shape.apart:
            device += unsharded_bytes(sizes, shape)
        if shape.apart:
            device += placed.slots.scratch_bytes(units)
        elif not below and shape.reduce_dtype.itemsize < GRADIENT_BYTES:  # zero-core's own store widens a gradient
            device += GRADIENT_BYTES * max((unit.spec.numel for unit in units), default=0)
        if not below and shape.parameter_dtype.itemsize < MASTER_BYTES:  # and has a master of what is frozen
            device += MASTER_BYTES * sum(
                run.count * run.unit.spec.numel for run in placed.runs if not run.unit.trainable
            )
        device += sum(sizes.not_sharded.values())
        host = placed.arena_bytes - counted.held_on("host") - (0 if shape.apart else counted.held_on("device"))
        host += SPILL_SLOTS * SPILL_PIECE_BYTES if "nvme" in activations else 0  # what checkpoints travel through
        return cls(device, host, held_back_bytes(placed, shape), activation_bytes(sizes, activations, tokens))


def held_back_bytes(placed: Placed, shape: Shape) -> int:
    """Bytes of whole gradients that no rank has reduced before the step: those of stage 1, and of `no_sync`."""
    if shape.ranks == 1 or not (shape.stage == 1 or (shape.no_sync and shape.accumulate > 1)):
        return 0
    itemsize = shape.reduce_dtype.itemsize if shape.accumulate == 1 else GRADIENT_BYTES
    numel = sum(run.count * run.unit.spec.numel for run in placed.runs if run.unit.trainable)
    return numel * shape.shard_count * itemsize


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


def _gradient_bytes(sizes: ModelSizes, shape: Shape, landed: bool, pooled: int) -> int:
    """Bytes of the pool, and of gradients on their way. `landed`: they go on to the host of a device apart."""
    trained = [sum(p.numel for p in unit.parameters if p.trained) and unit.numel for unit in sizes.units]
    itemsize = shape.reduce_dtype.itemsize
    unit = max(trained, default=0) * itemsize
    if not landed:
        return max(unit, pooled)
    roots = [each.encloses for each in sizes.units]
    largest = max((n for n, root in zip(trained, roots, strict=True) if not root), default=0)
    made = max((p.numel for u in sizes.units for p in u.parameters if p.trained), default=0)
    made *= shape.parameter_dtype.itemsize
    pairs = zip(trained, roots, strict=True)
    own = sum(n for n, root in pairs if lands_apart(n, largest, itemsize, root)) * itemsize
    return (LANDING_BUFFERS * largest * itemsize + own) // shape.shard_count + pooled + made


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


def needed_bytes(counted: Account, buffers: Buffers, budgets: Budgets) -> dict[str, int]:
    """Bytes by tier that has a budget, device counted as host where they share."""
    totals: dict[str, int] = {tier: buffers.on(tier) + buffers.activations.get(tier, 0) for tier in TIERS}
    for (tier, _), nbytes in counted.held.items():
        totals[tier] += nbytes
    if budgets.shared:
        totals["host"] += totals.pop("device")
    return totals


def check(counted: Account, buffers: Buffers, budgets: Budgets, hardware: Hardware) -> None:
    """Raise `PlanError` for the first tier (device, host, nvme) that is too small."""
    for tier, needed in needed_bytes(counted, buffers, budgets).items():
        budget = budgets.of(tier)
        assert budget is not None
        if needed > budget:
            what = _contents(counted, buffers, tier, budgets.shared)
            raise PlanError(tier, needed, budget, what, _way_out(tier, counted, buffers, budgets, hardware))


def _contents(counted: Account, buffers: Buffers, tier: str, shared: bool) -> str:
    """ "optimizer 12.0 GiB, buffers 1.0 GiB", largest first."""
    tiers = ("device", "host") if shared and tier == "host" else (tier,)
    parts: dict[str, int] = {}
    for (where, kind), nbytes in counted.held.items():
        if where in tiers:
            parts[kind] = parts.get(kind, 0) + nbytes
    parts["buffers"] = sum(buffers.on(where) for where in tiers)
    parts["activations"] = sum(buffers.activations.get(where, 0) for where in tiers)
    ranked = sorted(((nbytes, kind) for kind, nbytes in parts.items() if nbytes), reverse=True)
    return ", ".join(f"{kind} {gib(nbytes)}" for nbytes, kind in ranked)


def _way_out(tier: str, counted: Account, buffers: Buffers, budgets: Budgets, hardware: Hardware) -> str:
    """What to change, the nearest remedy first."""
    if tier == "nvme":
        return "give more nvme paths or room (hardware.nvme_gib, hardware.nvme_paths), or train on more nodes"
    tiers = ("device", "host") if budgets.shared and tier == "host" else (tier,)
    held = {kind: n for (where, kind), n in counted.held.items() if where in tiers and n}
    below = "host" if tier == "device" else "nvme"
    has_below = below == "host" or budgets.nvme > 0
    ways = []
    if held and has_below:
        ways.append(f"offload.{max(held, key=lambda kind: held[kind])}={below}")
    elif held and not has_below:
        ways.append("an nvme tier (offload.nvme_paths, hardware.nvme_gib)")
    if sum(buffers.activations.get(where, 0) for where in tiers):
        ways.append("fewer tokens a micro-batch")
    if buffers.held_back and "device" in tiers:
        ways.append("reducing every micro-batch (zero.no_sync=false, or zero.stage=2 instead of 1)")
    if sum(buffers.on(where) for where in tiers):
        ways.append("smaller units (TiledLinear)" if tier == "device" else "fewer slots (offload.slots)")
    ways.append(f"more ranks than {hardware.ranks} with zero.stage=3")
    return "lower it with " + ", or ".join(ways)

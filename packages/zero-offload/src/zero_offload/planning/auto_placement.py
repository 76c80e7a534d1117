"""Chooses the tiers of each kind, the number of slots, the policy of each unit's activations, and parts of a batch.

Moves tiles to slower tiers until every tier's budget is kept. Not here: a rank's bytes with each trial (in
budgets.py).

[Note: Priorities for a fast tier]
A byte of parameters is read twice for every micro-batch, a byte of gradients written and read once, a byte of optimizer
state read and written once a *step*. So everything starts on the fastest tier. Where that is too small, the tiles of
the optimizer go down first, then gradients, then parameters. Within a kind the last tiles go first.

Beside a discrete device the CPU's update may take longer than the parameters' copies, which hide behind compute. Then
whole units leave the device instead, and more states stay there: `plan` takes the faster prediction.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ..layout.footprint import STATE_KINDS, StorePlan
from ..layout.store_plan import MINIMUM_SLOTS
from ..layout.tile import Placement, check_device_shares, device_share, shares
from ..tier import TIERS, Tier
from .batches import Batch
from .budgets import POLICIES, Budgets, Holding, PlanError, activation_bytes, needed_bytes, slower
from .model_sizes import ModelSizes
from .traffic import Held, Shape, shards_of

DEMOTED = ("optimizer", "gradients", "parameters")
KEEP_SHARE = 0.3  # of the room that one unit's compute leaves on the device, for activations that are kept
CHECKPOINT_SHARE = 0.2  # of a tier's room, for checkpoints
MOST_PASSES = 64  # each moves a tile or ends; usually there are a handful


def best(
    sizes: ModelSizes,
    shape: Shape,
    budgets: Budgets | None,
    given: Mapping[str, Placement],
    batch: Batch,
    activations: str | Sequence[str],
    slots: int | None,
    *,
    whole: bool = False,
) -> tuple[StorePlan, dict[str, Placement], tuple[str, ...], Held]:
    """The store's plan, its placements, the policy of each unit, and the rank's bytes with them.

    The fastest placement within the budgets, and slots for a quarter of the stored tiles, or fewer where the budget
    of the host is smaller. whole: units leave a discrete device as a whole, see [Note: Priorities for a fast tier].
    """
    shards = shards_of(sizes, shape)
    everything = shards.place({kind: given.get(kind, TIERS[-1]) for kind in STATE_KINDS}, None)
    policies = choose_activations(activations, sizes, batch, _room(everything, budgets))
    held = Holding(sizes, shape, batch, policies, shards.cut).held
    least = slots if slots is not None or budgets is None else MINIMUM_SLOTS
    tile = shape.tile_numel / max(1, shards.numel)
    ends = {kind: shards.ends(trained=kind != "parameters") if shape.discrete else () for kind in STATE_KINDS}

    def cost(tried: Mapping[str, Placement]) -> Held:
        return held(shards.place(tried, least))

    placements = choose(given, budgets, tile, ends, cost, whole, shape.durable)
    plan = shards.place(placements, least)
    if slots is None and budgets is not None:
        slot_bytes = plan.state_slot_bytes + plan.gradient_slot_bytes
        room = budgets.rooms[Tier.HOST] - needed_bytes(held(plan), budgets)[Tier.HOST]
        if slot_bytes and room > 0:
            quarter = shards.place(placements, None)
            most = max(quarter.state_slots, quarter.gradient_slots)
            plan = shards.place(placements, max(MINIMUM_SLOTS, min(most, MINIMUM_SLOTS + room // slot_bytes)))
    return plan, placements, policies, held(plan)


def _room(plan: StorePlan, budgets: Budgets | None) -> Budgets | None:
    """The budgets less the bytes of `plan`: an upper bound on the memory left for activations."""
    if budgets is None:
        return None
    needed = needed_bytes({key: nbytes for key, nbytes in plan.held.items() if key[1] in STATE_KINDS}, budgets)
    memory = {tier: max(0, budgets.rooms[tier] - needed[tier]) for tier in needed if not Tier(tier).stored}
    return replace(budgets, rooms={**budgets.rooms, **memory})


def choose(
    given: Mapping[str, Placement],
    budgets: Budgets | None,
    tile: float,
    units: Mapping[str, Sequence[float]],
    cost: Callable[[Mapping[str, Placement]], Held],
    whole: bool = False,
    durable: bool = False,
) -> dict[str, Placement]:
    """Placements of all kinds: those `given`, the others as fast as the budgets allow.

    `tile`: one tile's share of all elements. `units`: by kind, where each unit ends, as a fraction of the kind's
    elements; empty unless a discrete device takes whole units only. `cost(placements)`: bytes held by tier and kind.
    `whole`: as in `best`. `durable`: no states on a discrete device, as a durable store writes them each step.
    If no placement fits, returns the slowest one, for the caller to refuse.
    """
    if budgets is None:
        return {kind: given.get(kind, Tier.HOST) for kind in STATE_KINDS}
    # Tiles up to ends[tier], a fraction of all elements, are on that tier or a faster one; the slowest has the others.
    fastest = {tier: 0.0 if tier == Tier.DEVICE and budgets.shared else 1.0 for tier in TIERS[:-1]}
    ends = {kind: dict(fastest) for kind in DEMOTED if kind not in given}
    if durable:
        ends |= {kind: ends[kind] | {Tier.DEVICE: 0.0} for kind in DEMOTED[:2] if kind in ends}
    tied = [kind for kind in DEMOTED[: 2 + whole] if kind in ends]  # a tile's gradient is on the tier of its states
    for kind in DEMOTED[:2]:
        if kind in given and tied and not budgets.shared:
            ends[tied[0]][Tier.DEVICE] = device_share(given[kind])
            tied = []

    def placements() -> dict[str, Placement]:
        return {kind: given[kind] if kind in given else _fractions(ends[kind]) for kind in STATE_KINDS}

    for _ in range(MOST_PASSES):
        moved = False
        held = cost(placements())
        for tier, total in needed_bytes(held, budgets).items():
            over = total - (budgets.of(tier) or 0)
            if over > 0 and tier in fastest and (not slower(tier).stored or budgets.of(slower(tier))):
                together = tied if tier == Tier.DEVICE else ()
                moved = _demote(held, ends, Tier(tier), over, tile, units, together) or moved
        if not moved:
            break
    return placements()


def _fractions(ends: Mapping[Tier, float]) -> dict[str, float]:
    spans = zip(TIERS, pairwise([0.0, *ends.values(), 1.0]), strict=True)
    return {str(tier): stop - start for tier, (start, stop) in spans if stop > start}


def _demote(
    held: Held,
    ends: dict[str, dict[Tier, float]],
    tier: Tier,
    over: int,
    tile: float,
    units: Mapping[str, Sequence[float]],
    tied: Sequence[str],
) -> bool:
    """Moves the last tiles or units on `tier`, about `over` bytes, to the next slower tier. False: there were none.

    `tied`: kinds that leave the tier together.
    """
    moved, faster = False, TIERS[: TIERS.index(tier)]
    for kind in [kind for kind in DEMOTED if kind in ends and kind not in tied[1:]]:
        together = tied if kind in tied else (kind,)
        end, begin = ends[kind][tier], max((ends[kind][each] for each in faster), default=0.0)
        moving = sum(held.get((tier, each), 0) for each in together)
        if over <= 0 or end <= begin:
            continue
        # A tile moves when its middle is beyond the end, so half a tile more moves no less than `over`.
        share = (end - begin) * over / moving if moving else 1.0
        if tier == Tier.DEVICE and units[kind]:
            lower = units[kind][max(0, bisect_right(units[kind], end - share) - 1)]
        else:
            lower = end - share - tile / 2
        for each in together:
            ends[each][tier] = max(begin, lower)
        over -= moving
        moved = True
    return moved


def choose_activations(
    wanted: str | Sequence[str], sizes: ModelSizes, batch: Batch, room: Budgets | None
) -> tuple[str, ...]:
    """One policy a unit. `room`: the budgets, less the bytes of values whose tier is given.

    "auto" is the first of these that fits: all kept; the last units kept and the rest recomputed; recomputed from
    checkpoints on host; recomputed from checkpoints on nvme.
    """
    if wanted != "auto":
        return _given_activations(wanted, sizes)
    count, tokens = sizes.blocks, batch.each
    if room is None or not tokens or not sizes.saved_bytes_per_token:
        return _of_blocks(sizes, ("keep",) * count)

    device, host = (room.of(tier) or 0 for tier in (Tier.HOST if room.shared else Tier.DEVICE, Tier.HOST))
    stored = bool(room.of(TIERS[-1]))
    # Every policy needs the memory of one unit's computation, and that of the output.
    free = device - activation_bytes(sizes, (Tier.HOST,) * len(sizes.units), batch)[Tier.DEVICE]
    saved, checkpoint = sizes.kept_bytes_per_token(room.shared) * tokens, sizes.checkpoint_bytes_per_token * tokens
    if count * saved <= KEEP_SHARE * free:
        return _of_blocks(sizes, ("keep",) * count)
    if count * checkpoint <= CHECKPOINT_SHARE * free or (room.shared and not stored):
        kept = min(count, max(0, int((KEEP_SHARE * free - count * checkpoint) // max(1, saved - checkpoint))))
        return _of_blocks(sizes, ("recompute",) * (count - kept) + ("keep",) * kept)
    on_host = not stored or (not room.shared and count * checkpoint <= CHECKPOINT_SHARE * host)
    return _of_blocks(sizes, (str(Tier.HOST if on_host else TIERS[-1]),) * count)


def _of_blocks(sizes: ModelSizes, policies: Sequence[str]) -> tuple[str, ...]:
    """One policy a unit, from one a block. Units that are not blocks keep their activations."""
    following = iter(policies)
    return tuple(next(following) if unit.is_block else "keep" for unit in sizes.units)


def _given_activations(wanted: str | Sequence[str], sizes: ModelSizes) -> tuple[str, ...]:
    for policy in (wanted,) if isinstance(wanted, str) else wanted:
        if policy not in POLICIES:
            raise ValueError(f"activations={policy!r} is no policy; policies are auto, {', '.join(POLICIES)}")
    if isinstance(wanted, str):
        return _of_blocks(sizes, (wanted,) * sizes.blocks)
    if len(wanted) != len(sizes.units):
        raise ValueError(
            f"{len(wanted)} activation policies for {len(sizes.units)} units: give one per unit, or one for all"
        )
    return tuple(wanted)


def given_placements(tiers: Sequence[Tier], discrete: bool, **wanted: str | Placement) -> dict[str, Placement]:
    """The placements that are not "auto".

    Raises PlacementError for an impossible one, and for those that no `discrete` device could update, assuming that
    the "auto" ones follow them.
    """
    given = {kind: placement for kind, placement in wanted.items() if placement != "auto"}
    for kind, placement in given.items():
        shares(placement, kind, tiers)
    states = given.get("optimizer", given.get("gradients"))
    if discrete and states is not None:
        device = device_share(states)
        follows: Placement = {Tier.DEVICE: device, Tier.HOST: 1.0 - device}
        check_device_shares(given.get("parameters", Tier.DEVICE), given.get("gradients", follows), states)
    return given


def choose_batch(planned: Callable[[Batch], Any], batch: Batch, rows: Any, tokens_at_once: Any) -> Any:
    """The plan, from `planned`, of the cut of the batch that fits and takes the fewest seconds.

    Of those within a hundredth of it, the one with the most rows, because the cost of many small kernels is not
    predicted. Where none fits, the first of those that cut rows too. If none of these fits, raises the last PlanError.
    """
    cuts, found = list(batch.cuts()) if rows == "auto" else [batch], []
    for cut in cuts:
        try:
            found.append(planned(cut))
        except PlanError as error:
            refusal = error
    if found:
        least = min(plan.step_seconds or 0.0 for plan in found)
        return next(plan for plan in found if (plan.step_seconds or 0.0) <= 1.01 * least)
    for cut in cuts[-1].row_cuts() if tokens_at_once == "auto" else ():
        try:
            return planned(cut)
        except PlanError as error:
            refusal = error
    raise refusal

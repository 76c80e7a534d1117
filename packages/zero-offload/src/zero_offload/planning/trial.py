"""Fills the fastest tiers first, then chooses the number of slots. Integers only.

Not here: a rank's bytes with each trial (in holding.py), the rule of choice (in automatic.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..placement import Placement
from ..tier import TIERS, Tier
from ..tiles.fitting import MINIMUM_SLOTS
from ..tiles.footprint import STATE_KINDS, StorePlan
from .accounting import Held, Shape, shards_of
from .automatic import choose, choose_activations
from .batches import Batch
from .budgets import Budgets, needed_bytes
from .holding import Holding
from .sizes import ModelSizes

__all__ = ["best"]


def best(
    sizes: ModelSizes,
    shape: Shape,
    budgets: Budgets | None,
    given: Mapping[str, Placement],
    batch: Batch,
    activations: str | Sequence[str],
    slots: int | None,
) -> tuple[StorePlan, dict[str, Placement], tuple[str, ...], Held]:
    """The store's plan, its placements, the policy of each unit, and the rank's bytes with them.

    The fastest placement within the budgets, and slots for a quarter of the stored tiles, or fewer where the budget
    of the host is smaller.
    """
    shards = shards_of(sizes, shape)
    everything = shards.place({kind: given.get(kind, TIERS[-1]) for kind in STATE_KINDS}, None)
    policies = choose_activations(activations, sizes, batch, _room(everything, budgets))
    held = Holding(sizes, shape, batch, policies, shards.cut).held
    least = slots if slots is not None or budgets is None else MINIMUM_SLOTS
    tile = shape.tile_numel / max(1, shards.numel)
    ends = {kind: shards.ends(trained=kind != "parameters") if shape.discrete else () for kind in STATE_KINDS}
    placements = choose(given, budgets, tile, ends, lambda tried: held(shards.place(tried, least)))
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

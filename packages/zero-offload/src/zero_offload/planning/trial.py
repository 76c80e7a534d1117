"""One model on one hardware while placements and slots are tried: what each trial costs, and the best that fits.

Owns no rule of choice (`automatic`), no bytes (`accounting`) and no seconds (`prediction`): it puts them together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zero_core.memory import FP32_BYTES
from zero_core.runtime.rehearsal import UnitSize, pooled_bytes

from ..placement import Placement
from ..tier import Tier
from ..tiles.footprint import MINIMUM_SLOTS, STATE_KINDS, StorePlan
from .accounting import Account, Held, Shape, shards_of
from .automatic import choose, choose_activations
from .budgets import Budgets, held_bytes, needed_bytes
from .hardware import Hardware
from .prediction import Prediction, predict
from .sizes import ModelSizes

__all__ = ["Trial"]


class Trial:
    """What stays the same while placements and slots are tried."""

    def __init__(
        self,
        sizes: ModelSizes,
        shape: Shape,
        budgets: Budgets | None,
        given: Mapping[str, Placement],
        tokens: int,
        activations: str | Sequence[str],
    ) -> None:
        self.sizes, self.shape, self.budgets, self.given, self._tokens = sizes, shape, budgets, given, tokens
        self._shards = shards_of(sizes, shape)
        self._pooled: dict[tuple[bool, int], int] = {}
        everything = self._shards.place({kind: given.get(kind, "nvme") for kind in STATE_KINDS}, None)
        self.policies = choose_activations(activations, sizes, tokens, self._room(everything))

    def best(self, slots: int | None) -> tuple[StorePlan, dict[str, Placement]]:
        """The fastest placement that fits, and with it as many slots as do, up to a quarter of what is on nvme."""
        least = slots if slots is not None or self.budgets is None else MINIMUM_SLOTS
        tile = self.shape.tile_numel / max(1, self._shards.numel)
        place = self._shards.place
        placements = choose(self.given, self.budgets, tile, lambda tried: self.held(place(tried, least)))
        plan = place(placements, least)
        if slots is not None or self.budgets is None:
            return plan, placements
        slot_bytes = plan.state_slot_bytes + plan.gradient_slot_bytes
        room = self.budgets.host - needed_bytes(self.held(plan), self.budgets)["host"]
        if slot_bytes and room > 0:
            quarter = place(placements, None)
            most = max(quarter.state_slots, quarter.gradient_slots)
            plan = place(placements, max(MINIMUM_SLOTS, min(most, MINIMUM_SLOTS + room // slot_bytes)))
        return plan, placements

    def predicted(
        self, plan: StorePlan, counted: Account, held: Held, hardware: Hardware, tokens: int
    ) -> Prediction | None:
        return predict(
            self.sizes,
            self.shape,
            counted,
            held,
            hardware,
            tokens=tokens,
            recomputed=_recomputed(self.sizes, self.policies),
            slot_fraction=_slot_fraction(plan),
        )

    def held(self, plan: StorePlan) -> Held:
        """What the rank holds in all, by tier and kind."""
        shape = self.shape
        swaps_in = plan.below and shape.apart
        whole = 0  # bytes of parameters that stages 0 to 2 keep unsharded, where that is not the store's own memory
        if shape.stage < 3 and (shape.shard_count > 1 or swaps_in):
            whole = self._shards.numel * shape.shard_count * shape.parameter_dtype.itemsize
        return held_bytes(
            self.sizes,
            shape,
            plan,
            pooled=self._pool(plan, swaps_in) - (0 if swaps_in else whole),
            whole=whole,
            tokens=self._tokens,
            activations=self.policies,
        )

    def _pool(self, plan: StorePlan, swaps_in: bool) -> int:
        """Bytes of zero-core's pool. `swaps_in`: units have memory of their own."""
        shape = self.shape
        tiers = {tier for run in plan.runs for tier in run.unit.gradient_tiers}
        if shape.apart and tiers - {Tier.DEVICE}:
            lends = shape.accumulate  # every gradient has a landing buffer
        elif shape.apart or not plan.below:  # zero-core's own store keeps a sum in other memory than what it lends
            lends = int(shape.arriving == 1 or shape.reduce_dtype.itemsize == FP32_BYTES)
        else:
            lends = int(Tier.NVME not in tiers)
        if (swaps_in, lends) not in self._pooled:
            units = []
            for run in self._shards.cut:
                spec = run.unit.spec
                size = UnitSize(spec.numel * shape.shard_count, spec.dtype.itemsize, run.unit.trainable, spec.encloses)
                units += [size] * min(run.count, self._most_in_a_row(size))
            self._pooled[swaps_in, lends] = pooled_bytes(
                units,
                shape.stage,
                shard_count=shape.shard_count,
                replicas=shape.replicas,
                reduce_itemsize=shape.reduce_dtype.itemsize,
                accumulate=shape.accumulate,
                no_sync=shape.no_sync,
                prefetch_bytes=shape.prefetch_bytes,
                resident_bytes=shape.resident_bytes,
                lends=lends,
                gathers=not swaps_in,
                exchanges=not shape.apart,
            )
        return self._pooled[swaps_in, lends]

    def _most_in_a_row(self, size: UnitSize) -> int:
        """How many units of one size to rehearse: where nothing is kept, the pool is as large for any more of them."""
        shape = self.shape
        if shape.stage < 3 or shape.no_sync:
            return sys.maxsize
        return 8 + (shape.prefetch_bytes + shape.resident_bytes) // max(1, size.numel * size.itemsize)

    def _room(self, plan: StorePlan) -> Budgets | None:
        """The budgets, less the states that are given a tier: what there is for activations, at most."""
        if self.budgets is None:
            return None
        device, host = (sum(plan.bytes_of(tier, kind) for kind in STATE_KINDS) for tier in ("device", "host"))
        host = self.budgets.host - host - (device if self.budgets.shared else 0)
        return replace(self.budgets, device=max(0, self.budgets.device - device), host=max(0, host))


def _slot_fraction(plan: StorePlan) -> float:
    """The share of the states on nvme that slots hold at once."""
    on_nvme = plan.bytes_of("nvme", "optimizer")
    return min(1.0, plan.state_slots * plan.state_slot_bytes / on_nvme) if on_nvme else 0.0


def _recomputed(sizes: ModelSizes, policies: Sequence[str]) -> float:
    """The share of the model's compute that backward does again."""
    again = sum(u.compute_numel for u, policy in zip(sizes.units, policies, strict=True) if policy != "keep")
    return again / sizes.compute_numel if sizes.compute_numel else 0.0

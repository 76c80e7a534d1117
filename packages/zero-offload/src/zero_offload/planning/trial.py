"""One model on one hardware while placements and slots are tried: what each trial costs, and the best that fits.

Owns no rule of choice (`automatic`), no bytes (`accounting`) and no seconds (`prediction`): it puts them together.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from zero_core.runtime.rehearsal import Rehearsal, UnitSize

from ..placement import Placement
from ..tier import Tier
from ..tiles.footprint import GRADIENT_BYTES, MINIMUM_SLOTS
from .accounting import STATE_KINDS, Account, Cut, Placed, Shape, account
from .automatic import choose, choose_activations
from .budgets import Budgets, Buffers, needed_bytes
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
        device_whole: bool,
    ) -> None:
        self.sizes, self.shape, self.budgets, self.given = sizes, shape, budgets, given
        self._tokens, self._device_whole = tokens, device_whole
        self._cut = Cut(sizes, shape)
        self._pooled: dict[tuple[bool, int], int] = {}
        everything = account(self.place({kind: given.get(kind, "nvme") for kind in STATE_KINDS}, None), shape)
        self.policies = choose_activations(activations, sizes, tokens, self._room(everything))

    def best(self, slots: int | None) -> tuple[Placed, dict[str, Placement]]:
        """The fastest placement that fits, and with it as many slots as do, up to a quarter of what is on nvme."""
        least = slots if slots is not None or self.budgets is None else MINIMUM_SLOTS

        def cost(placements: Mapping[str, Placement]) -> tuple[Account, Mapping[str, int]]:
            placed = self.place(placements, least)
            return self.cost(placed)[0], self.needed(placed)

        tile = self.shape.tile_numel / max(1, self._cut.numel)
        placements = choose(self.given, self.budgets, tile, cost, device_whole=self._device_whole)
        placed = self.place(placements, least)
        if slots is not None or self.budgets is None:
            return placed, placements
        slot_bytes = placed.slots.state_slot_bytes + placed.slots.gradient_slot_bytes
        room = self.budgets.host - self.needed(placed)["host"]
        if slot_bytes and room > 0:
            quarter = self.place(placements, None).slots
            most = max(quarter.state_slots, quarter.gradient_slots)
            placed = self.place(placements, max(MINIMUM_SLOTS, min(most, MINIMUM_SLOTS + room // slot_bytes)))
        return placed, placements

    def predicted(
        self, placed: Placed, counted: Account, buffers: Buffers, hardware: Hardware, tokens: int
    ) -> Prediction | None:
        return predict(
            self.sizes,
            self.shape,
            counted,
            hardware,
            tokens=tokens,
            recomputed=_recomputed(self.sizes, self.policies),
            slot_fraction=_slot_fraction(placed, counted),
            spilled=buffers.activations,
        )

    def place(self, placements: Mapping[str, Placement], slots: int | None) -> Placed:
        return self._cut.place(placements, slots)

    def cost(self, placed: Placed) -> tuple[Account, Buffers]:
        shape, counted = self.shape, account(placed, self.shape)
        swaps_in = placed.below and shape.apart
        whole = 0  # bytes of parameters that stages 0 to 2 keep unsharded, where that is not the store's own memory
        if shape.stage < 3 and (shape.shard_count > 1 or swaps_in):
            whole = self._cut.numel * shape.shard_count * shape.parameter_dtype.itemsize
        buffers = Buffers.needed(
            self.sizes,
            shape,
            placed,
            counted,
            pooled=self._pool(placed, swaps_in) - (0 if swaps_in else whole),
            tokens=self._tokens,
            activations=self.policies,
        )
        if whole:
            # zero-core's own store rounds a 16-bit shard from the master where the whole unit stays.
            if placed.below or not shape.apart or shape.parameter_dtype == torch.float32:
                whole += counted.held.get(("device", "parameters"), 0)
            counted = replace(counted, held={**counted.held, ("device", "parameters"): whole})
        return counted, buffers

    def _pool(self, placed: Placed, swaps_in: bool) -> int:
        """Bytes of zero-core's pool. `swaps_in`: units have memory of their own."""
        shape = self.shape
        tiers = {tier for run in placed.runs for tier in run.unit.gradient_tiers}
        if shape.apart and tiers - {Tier.DEVICE}:
            lends = shape.accumulate  # every gradient has a landing buffer
        elif shape.apart or not placed.below:  # zero-core's own store keeps a sum in other memory than what it lends
            lends = int(shape.arriving == 1 or shape.reduce_dtype.itemsize == GRADIENT_BYTES)
        else:
            lends = int(Tier.NVME not in tiers)
        if (swaps_in, lends) not in self._pooled:
            units = []
            for run in self._cut.runs:
                spec = run.unit.spec
                size = UnitSize(spec.numel * shape.shard_count, spec.dtype.itemsize, run.unit.trainable, spec.encloses)
                units += [size] * min(run.count, self._most_in_a_row(size))
            self._pooled[swaps_in, lends] = Rehearsal(
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
            ).pooled_bytes()
        return self._pooled[swaps_in, lends]

    def _most_in_a_row(self, size: UnitSize) -> int:
        """How many units of one size to rehearse: where nothing is kept, the pool is as large for any more of them."""
        shape = self.shape
        if shape.stage < 3 or shape.no_sync:
            return sys.maxsize
        return 8 + (shape.prefetch_bytes + shape.resident_bytes) // max(1, size.numel * size.itemsize)

    def needed(self, placed: Placed) -> dict[str, int]:
        assert self.budgets is not None
        return needed_bytes(*self.cost(placed), self.budgets)

    def _room(self, given: Account) -> Budgets | None:
        """The budgets, less the states that are given a tier: what there is for activations, at most."""
        if self.budgets is None:
            return None
        device, host = given.held_on("device"), given.held_on("host")
        host = self.budgets.host - host - (device if self.budgets.shared else 0)
        return replace(self.budgets, device=max(0, self.budgets.device - device), host=max(0, host))


def _slot_fraction(placed: Placed, counted: Account) -> float:
    """The share of the states on nvme that slots hold at once."""
    on_nvme = counted.held.get(("nvme", "optimizer"), 0)
    return min(1.0, placed.slots.state_slots * placed.slots.state_slot_bytes / on_nvme) if on_nvme else 0.0


def _recomputed(sizes: ModelSizes, policies: Sequence[str]) -> float:
    """The share of the model's compute that backward does again."""
    again = sum(u.compute_numel for u, policy in zip(sizes.units, policies, strict=True) if policy != "keep")
    return again / sizes.compute_numel if sizes.compute_numel else 0.0

"""One model on one hardware while placements and slots are tried: what each trial costs, and the best that fits.

Owns no rule of choice (`automatic`), no bytes (`accounting`) and no seconds (`prediction`): it puts them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .accounting import STATE_KINDS, Account, Cut, Placed, Shape, account
from .automatic import choose, choose_activations
from .budgets import Budgets, Buffers, needed_bytes
from .footprint import MINIMUM_SLOTS
from .hardware import Hardware
from .placement import Placement
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
        stage: int,
        tokens: int,
        activations: str | Sequence[str],
        device_whole: bool,
    ) -> None:
        self.sizes, self.shape, self.budgets, self.given = sizes, shape, budgets, given
        self._stage, self._tokens, self._device_whole = stage, tokens, device_whole
        self._cut = Cut(sizes, shape)
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
        counted = account(placed, self.shape)
        if self._stage < 3:
            whole = self.sizes.numel * self.shape.parameter_dtype.itemsize
            if self.shape.apart and placed.below:  # beside what lives there by its placement
                whole += counted.held.get(("device", "parameters"), 0)
            counted = replace(counted, held={**counted.held, ("device", "parameters"): whole})
        buffers = Buffers.needed(
            self.sizes,
            self.shape,
            placed,
            counted,
            shared=self.budgets is None or self.budgets.shared,
            stage=self._stage,
            tokens=self._tokens,
            activations=self.policies,
        )
        return counted, buffers

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

"""Checks the arguments of a TieredStore, plans its shards, and opens the generation that a durable run resumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..core import ElementBytes, ShardSpec, StoreContext
from ..durable.generations import Generations
from ..errors import BudgetError, GenerationError, OffloadError, PlacementError, gib
from ..layout.footprint import STATE_KINDS, StorePlan
from ..layout.store_plan import plan_store
from ..layout.tile import check_tile_numel, check_update_share, shares
from ..memory.arena import HostBudget
from ..memory.transfers import Stores
from ..protocols import UpdateStep
from ..tier import Tier, tiers_with
from .read_generation import generation_layout


class Arguments:
    """The arguments that decide the plan of one TieredStore, which documents them. layout: as of `plan_store`.

    Raises PlacementError for an impossible placement or tile size, and for a tier that no ByteStore was given for.
    """

    def __init__(self, stores: Stores, plan: Any, accumulate: int | None, durable: bool | str, **layout: Any) -> None:
        if durable not in (False, True, "process"):
            raise ValueError(f'durable={durable!r} must be False, True or "process"')
        layout["tiers"] = tiers_with(stores)
        if plan is not None:
            layout |= {**plan.placements, "tile_numel": plan.tile_numel, "slots": plan.slots, "tiers": plan.shape.tiers}
            accumulate, layout["update_share"] = plan.shape.arriving, plan.shape.update_share
        check_update_share(layout["update_share"])
        for kind in STATE_KINDS:
            for tier, share in shares(layout[kind], kind, layout["tiers"]).items():
                if share > 0 and tier.stored and tier not in stores:
                    raise PlacementError(f"{kind}={layout[kind]!r} needs {tier.argument}")
        check_tile_numel(layout["tile_numel"])
        self._stores, self._accumulate, self._planned, self._layout = stores, accumulate, plan, layout
        self.durable, self.update_share = durable, layout["update_share"]
        self.budget = layout["host_bytes"] if isinstance(layout["host_bytes"], HostBudget) else None

    def plan(self, shards: Sequence[ShardSpec], step: UpdateStep, context: StoreContext, discrete: bool) -> StorePlan:
        """The store's plan for these shards. discrete: the compute device is not the CPU.

        Raises BudgetError if a budget or the unit slots are too small, and PlacementError and OffloadError for what
        neither the arguments nor their Plan provide for.
        """
        if context.keeps_gradients and self._planned is not None and not self._planned.shape.keeps_gradients:
            raise OffloadError(
                "shard() keeps whole gradients until the step, as stage=1 and find_unused_parameters=True ask for, and "
                "this store's plan counts no memory for them: give zero_offload.plan the same arguments as shard()"
            )
        if self.update_share and not discrete:
            raise PlacementError(f"update_share={self.update_share} needs a device besides the CPU: leave it out here")
        with nullcontext() if self.budget is None else self.budget.explained():
            plan = plan_store(
                shards,
                step,
                prefetch_bytes=context.prefetch_bytes,
                shard_count=context.shard_count,
                alignment=math.lcm(*(transfers.alignment for transfers in self._stores.values())),
                landing_dtype=context.reduce_dtype if discrete else None,
                gradient_itemsize=ElementBytes(context.reduce_dtype, context.reduce_dtype).gradient(self._accumulate),
                **self._layout | ({} if self.budget is None else {"host_bytes": self.budget.free_bytes}),
            )
        streamed = [unit.spec.name for i, unit in enumerate(plan.units) if unit.streamed and i not in plan.own_slots]
        lends_all = context.keeps_parameters and context.shard_count == 1 and not discrete
        if lends_all and len(streamed) > plan.unit_slots:
            raise BudgetError(
                f"with stage=0, 1 or 2 all parameters stay in host memory until the step: {len(streamed)} units need a "
                f"slot of {gib(plan.unit_slot_bytes)} each, and there are {plan.unit_slots} slots; use stage=3. Or set "
                'parameters="host". Or raise prefetch_bytes to the bytes of all these units'
            )
        return replace(plan, durable_on=Tier.NVME) if self.durable else plan

    def adopted(
        self, plan: StorePlan, step: UpdateStep, optimizer: torch.optim.Optimizer, context: StoreContext
    ) -> Generations | None:
        """The generations on nvme, after adopting the last one that all ranks have; None: the store is not durable.

        Raises GenerationError, as Generations does, and for placements as `generation_layout` does.
        """
        if not self.durable:
            return None
        if Tier.NVME not in self._stores:
            raise GenerationError("durable= needs a named ByteStore, such as nvme=zero_nvme.Slab([path], name=...)")
        layout = generation_layout(plan, step, optimizer, context)
        generations = Generations(self._stores[Tier.NVME], layout, sync=self.durable != "process")
        generations.adopt(context.agree([each.number for each in generations.found]))
        return generations

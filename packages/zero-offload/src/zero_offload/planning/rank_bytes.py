"""Counts a rank's bytes with a placement: the store's, the buffers' beside it, and activations'. Integers only.

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

import sys
from collections.abc import Sequence

from ..core import FP32_BYTES, Rehearsal, UnitSize, unit_memory
from ..layout.footprint import SPILL_PIECE_BYTES, SPILL_SLOTS, STATE_KINDS, StorePlan, UnitRun
from ..tier import TIERS, Tier
from .batches import Batch
from .budgets import activation_bytes, unsharded_bytes
from .model_sizes import ModelSizes
from .traffic import Held, Shape


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
            for run in plan.runs:
                device += run.count * unit_memory.secondary_bytes(self._unit_bytes(run), shape.ranks_per_machine)
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

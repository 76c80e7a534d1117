"""Predicts the seconds of a step by rooflines: each window of it lasts as long as its busiest resource.

Pure: takes bytes from `traffic` and rates from `hardware`. Chooses nothing.

[Note: What hides where]
    forward    of the first micro-batch: states in and out, the update itself, parameters of the forward
    backward   parameters read again, gradients out; and as much of the state traffic as fits the slots, since the
               reads of the first tiles may start, and the writes of the last may end, in backward
Within a window the resources (compute, each stored tier, link, network, the CPU's update) work side by side. Where the
CPU is the compute device its update competes with compute: I/O hides, arithmetic adds. Beside a discrete device that
keeps no states, the first unit's update and copy and the last gradient's copy hide behind nothing: of update, copies
and compute, a unit's share of all but the longest comes on top.
The rates of a tier that compresses are those that it reaches beside compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core import FP32_BYTES
from ..layout.footprint import StorePlan
from ..tier import Tier
from .batches import Batch
from .hardware import Hardware
from .model_sizes import ModelSizes
from .traffic import Account, Held, Shape

FLOP = 2  # of a parameter and token: in a forward, in a backward for the input, and for the weight if it is trained


@dataclass(frozen=True)
class Prediction:
    """Seconds of one rank's optimizer step. `busy`: seconds of work by resource, hidden or not."""

    step_seconds: float
    compute_seconds: float
    update_seconds: float
    exposed_seconds: float  # step less compute: what overlap does not hide, the CPU's update included
    busy: dict[str, float]


def predict(
    sizes: ModelSizes,
    shape: Shape,
    plan: StorePlan,
    account: Account,
    held: Held,
    hardware: Hardware,
    *,
    batch: Batch,
    activations: Sequence[str],
) -> Prediction | None:
    """Predicts one step of one rank's `batch`. None where the hardware lacks a figure that this account needs.

    `held`: bytes by tier and kind. `activations`: one policy a unit.
    """
    time, accumulate, numel = _Time(hardware), shape.accumulate, max(1, sizes.compute_numel)
    each = time.of(FLOP * numel, hardware.flops(shape.parameter_dtype))  # a token's forward
    again = sum(unit.compute_numel for unit in sizes.recomputed(activations, batch)) / numel
    trained = sum(unit.compute_numel for unit in sizes.units if unit.trained) / numel
    forward = each * batch.tokens / accumulate
    backward = forward * (1 + trained + again)
    compute = (forward + backward) * accumulate
    # In the device's memory each part's gradient is widened to fp32, and all but the first are added to a sum.
    itemsize, parts = shape.parameter_dtype.itemsize, batch.parts * batch.token_parts
    widened = (itemsize + FP32_BYTES) * (itemsize < FP32_BYTES)
    summed = sum(map(sum, sizes.summed(activations, batch)))
    backward += time.memory(Tier.DEVICE, summed * (parts * widened + (parts - 1) * 3 * FP32_BYTES))

    products = dict.fromkeys((True, False), 0.0)  # of matrices whose states are on the device, and of others
    for (tier, dtype), flop in account.flop.items():
        products[tier == Tier.DEVICE] += time.of(flop, hardware.flops(dtype))
    on_device = time.memory(Tier.DEVICE, account.updated.get(Tier.DEVICE, 0)) + products[True]
    behind = max(time.memory(Tier.HOST, account.updated.get(Tier.HOST, 0)), time.link(*account.visits))
    update, arithmetic, count = on_device + max(behind, products[False]), on_device + products[False], math.inf
    if hardware.shares_host:  # arithmetic takes turns
        update = arithmetic = arithmetic + behind
        behind = 0.0
    elif not held.get((Tier.DEVICE, "optimizer")):
        count = len(sizes.units)
    windows = _windows(time, sizes, shape, plan, account, held)

    def lasts(name: str, *stages: float) -> float:
        """A unit passes through the stages, and the copy, one after another."""
        stages = (*stages, windows[name]["link"])
        return max(max(stages) + (sum(stages) - max(stages)) / count, *windows[name].values())

    first, later, back = lasts("first", forward + arithmetic, behind), lasts("later", forward), lasts("back", backward)
    # State traffic that the slots let slip into backward must find room there; the rest waits in the forward.
    slipped = windows["slipped"]
    overflow = max(slipped[tier] - accumulate * (back - windows["back"][tier]) for tier in slipped)
    seconds = first + (accumulate - 1) * later + accumulate * back + max(0.0, overflow)
    if not time.known:
        return None
    counts = {"first": 1, "later": accumulate - 1, "back": accumulate, "slipped": 1}
    busy = {lane: sum(n * windows[name].get(lane, 0.0) for name, n in counts.items()) for lane in windows["first"]}
    work = {"compute": compute, "update": update, **busy}
    return Prediction(seconds, compute, update, seconds - compute, work)


def _windows(
    time: _Time, sizes: ModelSizes, shape: Shape, plan: StorePlan, account: Account, held: Held
) -> dict[str, dict[str, float]]:
    """Seconds of each resource in the first forward, a later one and a backward, and of I/O that slips to backward."""

    def away(kind: str) -> int:
        return sum(nbytes for (tier, each), nbytes in held.items() if each == kind and tier != Tier.DEVICE)

    accumulate, arrived = shape.accumulate, shape.arriving / shape.accumulate  # backwards that end in a reduction
    share = (shape.shard_count - 1) / shape.shard_count  # the part of a gather or reduction that other ranks send
    whole = sum(unit.nbytes(shape.parameter_dtype) for unit in sizes.units)
    reduced = arrived * sum(unit.trained_numel for unit in sizes.units) * shape.reduce_dtype.itemsize
    again = 0 if shape.secondary_shards else whole  # gathered over the network, and not inside of the machine
    parameters, aside, visits = away("parameters"), away("activations"), account.visits
    down = away("gradients") * arrived * shape.reduce_dtype.itemsize / shape.gradient_itemsize
    first = {"link": time.link(parameters + visits[0], aside + visits[1]), "network": time.network(whole * share)}
    later = {"link": time.link(parameters, aside), "network": time.network(again * share)}
    back = {"link": time.link(parameters + aside, down), "network": time.network((again + reduced) * share)}
    slipped = dict[str, float]()
    stored = sum(plan.bytes_of(tier, "optimizer") for tier in account.moved)
    slips = min(1.0, plan.state_slots * plan.state_slot_bytes / stored) if stored else 0.0
    for tier, moved in account.moved.items():
        aside = held.get((tier, "activations"), 0)
        states = time.stored(tier, moved["optimizer_read"], moved["optimizer_write"] + moved["parameters_write"])
        read = (moved["backward_read"] + moved["accumulate_read"]) / accumulate + aside
        later[tier] = time.stored(tier, moved["forward_read"] / accumulate, aside)
        back[tier] = time.stored(tier, read, moved["gradients_write"] / accumulate)
        slipped[tier] = slips * states
        first[tier] = later[tier] + states - slipped[tier] + time.stored(tier, moved["gradients_read"], 0)
    return {"first": first, "later": later, "back": back, "slipped": slipped}


class _Time:
    """Seconds of a rank's work. `known`: False once a rate was needed that the hardware lacks."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware, self.known = hardware, True

    def of(self, amount: float, rate: float | None) -> float:
        self.known = self.known and (not amount or rate is not None)
        return amount / rate if rate else 0.0

    def network(self, nbytes: float) -> float:
        return self.of(nbytes, self._hardware.rank_rate("network_gbps"))

    def memory(self, where: Tier, nbytes: float) -> float:
        on_host = where == Tier.HOST or self._hardware.shares_host
        return self.of(nbytes, self._hardware.rank_rate("update_gbps" if on_host else "device_gbps"))

    def link(self, up: float, down: float) -> float:
        """Seconds of copies in both directions at once; 0 where the device tier is host memory."""
        if self._hardware.shares_host:
            return 0.0
        each, out, mixed = (self._hardware.rank_rate(f"link_{name}gbps") for name in ("", "out_", "mixed_"))
        return max(self.of(up, each), self.of(down, out), (up + down) / mixed if mixed else 0.0)

    def stored(self, tier: str, read: float, written: float) -> float:
        """Seconds of reads and writes; they take turns where no rate of both at once is known."""
        reads, writes, mixed = self._hardware.tier_rates(tier)
        alone = self.of(read, reads), self.of(written, writes)
        return sum(alone) if mixed is None else max(*alone, (read + written) / mixed)

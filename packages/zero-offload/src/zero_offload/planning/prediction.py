"""Predicts step time, the part that overlap cannot hide, and the batch size above which all I/O is hidden.

Owns the arithmetic of windows. Pure: takes bytes from `accounting` and rates from `hardware`.

[Note: What hides where]
    forward    of the first micro-batch: states in and out, the update itself, parameters of the forward
    backward   parameters read again, gradients out; and as much of the state traffic as fits the slots, since the
               reads of the first tiles may start, and the writes of the last may end, in backward
Within a window the resources (compute, each stored tier, link, network, the CPU's update) work side by side, so it
lasts as long as its busiest one. Where the CPU is the compute device its update competes with compute: I/O hides,
arithmetic adds. On a discrete device the windows have ends as well, which nothing hides: `timetable` has them by unit.
It shares its arithmetic between the forward and the updates of whole matrices, as Muon's.
The rates of a tier that compresses are those that it reaches beside compute.
A window is w FLOP per parameter and token: 2 for a forward; 4 for a backward, of which a parameter that is not trained
takes 2; 2 more to recompute. Traffic of B bytes per parameter hides in it iff tokens ≥ B·F/(w·BW).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

from zero_core.memory import FP32_BYTES

from ..tier import Tier
from ..tiles.footprint import LANDING_BUFFERS, StorePlan
from .accounting import Account, Held, Shape, stays
from .batches import Batch
from .hardware import Hardware
from .sizes import ModelSizes
from .timetable import UnitWork, backward_seconds, forward_seconds

FORWARD_FLOP = 2
INPUT_FLOP = 2  # of a backward: the gradient of a layer's input
WEIGHT_FLOP = 2  # and that of its weight, if that is trained


@dataclass(frozen=True)
class Prediction:
    """Seconds of one rank's optimizer step. `busy`: seconds of work by resource, hidden or not."""

    step_seconds: float
    compute_seconds: float
    update_seconds: float
    exposed_seconds: float  # step less compute: what overlap does not hide, the CPU's update included
    hides_from_tokens: int | None  # of one rank's step; None: no compute to hide behind. Activations and ends apart
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
    """Predict one step of one rank's `batch`. None where the hardware lacks a figure that this account needs.

    `held`: bytes by tier and kind. `activations`: one policy a unit.
    """
    summed = sum(map(sum, sizes.summed(activations, batch)))
    rates = _rates(account, shape, hardware, summed > 0)
    checkpoints = [transfer_seconds(hardware, tier, held.get((tier, "activations"), 0), 0) for tier in account.moved]
    if rates is None or None in checkpoints:
        return None
    stored = sum(plan.bytes_of(tier, "optimizer") for tier in account.moved)
    slips = min(1.0, plan.state_slots * plan.state_slot_bytes / stored) if stored else 0.0
    step = _Step(sizes, shape, account, held, hardware, slips, *rates)
    again = sum(u.compute_numel for u in sizes.recomputed(activations, batch))
    recomputed = again / sizes.compute_numel if sizes.compute_numel else 0.0
    token_flop = sizes.compute_numel / step.flops  # seconds per FLOP-per-parameter and token
    trained = sum(u.compute_numel for u in sizes.units if u.trained) / max(1, sizes.compute_numel)
    backward_flop = INPUT_FLOP + WEIGHT_FLOP * trained + FORWARD_FLOP * recomputed
    forward_each, backward_each = FORWARD_FLOP * token_flop, backward_flop * token_flop
    accumulate = shape.accumulate
    micro = batch.tokens / accumulate
    forward, backward = forward_each * micro, backward_each * micro
    compute = (forward + backward) * accumulate
    # In the device's memory each part's gradient is widened to fp32, and all but the first are added to a sum.
    itemsize = shape.parameter_dtype.itemsize
    widened = itemsize + FP32_BYTES if itemsize < FP32_BYTES else 0
    parts = batch.parts * batch.token_parts
    moved = summed * (parts * widened + (parts - 1) * 3 * FP32_BYTES)
    backward += moved / (step.host_update if hardware.shares_host else step.device_update)
    on_device = account.updated.get(Tier.DEVICE, 0) / step.device_update + step.products(Tier.DEVICE)
    update = step.beside + on_device
    windows = step.windows()
    lanes = list(windows["backward"])
    if hardware.shares_host:
        arithmetic, behind, passes = update, 0.0, (forward, forward, backward, 0.0)  # the update takes turns
        products = 0.0
    else:  # it runs beside compute, and the link is in `passes`
        arithmetic, behind, passes = on_device, step.beside, step.by_unit(forward, backward)
        products = step.products(Tier.HOST)  # whose compute the device shares with the forward
        lanes.remove("link")
    first = max(max(passes[0], forward + products) + arithmetic, behind, *windows["first"].values())
    later = max(passes[1], *windows["forward"].values())
    back = max(passes[2], *(windows["backward"][lane] for lane in lanes))
    # State traffic that the slots let slip into backward must find room there; what does not waits in the forward.
    slipped = windows["slipped"]
    overflow = max(slipped[tier] - accumulate * (back - windows["backward"][tier]) for tier in slipped)
    seconds = first + (accumulate - 1) * later + accumulate * back + passes[3] + max(0.0, overflow)
    busy = {
        lane: slipped.get(lane, 0.0)
        + windows["first"][lane]
        + (accumulate - 1) * windows["forward"][lane]
        + accumulate * windows["backward"][lane]
        for lane in windows["first"]
    }
    hides_from = None
    if token_flop:
        aside = {key: nbytes for key, nbytes in held.items() if key[1] != "activations"}
        windows = replace(step, held=aside).windows()
        slack = max(slipped[tier] / accumulate + windows["backward"][tier] for tier in slipped)
        need = max(behind - products, *windows["first"].values()) / forward_each
        need = max(need, max(slack, *windows["backward"].values()) / backward_each)
        hides_from = -int(-need * accumulate // 1)
    return Prediction(
        step_seconds=seconds,
        compute_seconds=compute,
        update_seconds=update,
        exposed_seconds=seconds - compute,
        hides_from_tokens=hides_from,
        busy={"compute": compute, "update": update, **busy},
    )


def transfer_seconds(hardware: Hardware, tier: str, read_bytes: float, write_bytes: float) -> float | None:
    """Seconds that one rank's share of a stored tier takes for these bytes; None: rates not known."""
    if not read_bytes and not write_bytes:
        return 0.0
    read, write, mixed = hardware.tier_rates(tier)
    if read is None or write is None:
        return None
    if mixed is None:
        return read_bytes / read + write_bytes / write
    return max(read_bytes / read, write_bytes / write, (read_bytes + write_bytes) / mixed)


def _rates(account: Account, shape: Shape, hardware: Hardware, sums: bool) -> list[float] | None:
    """The rates of a `_Step`; None: one that is needed is not known. `sums`: gradients are summed over parts."""
    on_host, on_device = bool(account.updated.get(Tier.HOST)), sums or bool(account.updated.get(Tier.DEVICE))
    shares = hardware.shares_host
    needed = (
        ("link_gbps", not shares),
        ("link_out_gbps", not shares),
        ("network_gbps", shape.shard_count > 1),
        ("update_gbps", on_host or (on_device and shares)),
        ("update_gbps" if shares else "device_gbps", on_device),
    )
    found = [hardware.rank_rate(name) if used else float("inf") for name, used in needed]
    found.insert(0, hardware.flops(shape.parameter_dtype))
    rates = [rate for rate in found if rate is not None]
    totals = {tier: (account.read_bytes(tier), account.write_bytes(tier)) for tier in account.moved}
    known = None not in [transfer_seconds(hardware, tier, *moved) for tier, moved in totals.items()]
    known = known and None not in [hardware.flops(dtype) for _, dtype in account.flop]
    return rates if known and len(rates) == len(found) else None


@dataclass(frozen=True)
class _Step:
    """What is predicted. Rates are one rank's, in bytes (FLOP) a second; infinite where the resource is not used."""

    sizes: ModelSizes
    shape: Shape
    account: Account
    held: Held
    hardware: Hardware
    slips: float  # the share of the stored states that slots hold at once
    flops: float
    link: float  # host to device
    link_out: float
    network: float
    host_update: float
    device_update: float

    def products(self, where: str) -> float:
        """Seconds of the matrix products in updates of what is kept there."""
        found = ((self.hardware.flops(dtype), n) for (tier, dtype), n in self.account.flop.items() if tier == where)
        return sum(flop / rate for rate, flop in found if rate)

    @property
    def beside(self) -> float:
        """Seconds of the updates: memory traffic on the host and products. On a discrete device products run there,
        and copies of uncut tiles beside them, so the longest of these counts. They come in turn where parameters live
        on the device, as each passes through host memory."""
        there, back = self.account.visits
        traffic, products = self.account.updated.get(Tier.HOST, 0) / self.host_update, self.products(Tier.HOST)
        if not there or self.held.get((Tier.DEVICE, "parameters"), 0):
            return traffic + products + there / self.link + back / self.link_out
        mixed = self.hardware.rank_rate("link_mixed_gbps") or float("inf")
        return max(traffic, products, there / self.link, back / self.link_out, (there + back) / mixed)

    def off_device(self, kind: str) -> int:
        """Bytes that are not on the device."""
        return sum(nbytes for (tier, each), nbytes in self.held.items() if each == kind and tier != Tier.DEVICE)

    def windows(self) -> dict[str, dict[str, float]]:
        """Seconds of each resource in the first forward, a later one and a backward, and what slips to backward."""
        shape, accumulate, away = self.shape, self.shape.accumulate, self.off_device("activations")
        share = (shape.shard_count - 1) / shape.shard_count  # of what is gathered or reduced, from other ranks
        nbytes, staying = self.copies()
        gather, gather_again = sum(nbytes) * share, (sum(nbytes) - sum(compress(nbytes, staying))) * share
        if shape.secondary_shards:
            gather_again = 0.0  # inside of the machine
        reduction = sum(unit.trained_numel for unit in self.sizes.units) * shape.reduce_dtype.itemsize * share
        arrived = shape.arriving / accumulate  # the share of backwards that end in a reduction
        narrow = shape.reduce_dtype.itemsize / shape.gradient_itemsize
        parameters = self.off_device("parameters")
        up = parameters - sum(compress(self._units_off_device("parameters", nbytes), staying)) + away
        down = self.off_device("gradients") * narrow * arrived  # bytes of a backward, as `up`
        mixed = self.hardware.rank_rate("link_mixed_gbps") or float("inf")
        forward = {"link": max(parameters / self.link, away / self.link_out), "network": gather / self.network}
        backward = {
            "link": max(up / self.link, down / self.link_out, (up + down) / mixed),  # full duplex
            "network": (gather_again + arrived * reduction) / self.network,
        }
        first, slipped = dict(forward), dict[str, float]()
        first["link"] += max(self.account.visits[0] / self.link, self.account.visits[1] / self.link_out)
        forward["network"] *= not shape.secondary_shards
        for tier, moved in self.account.moved.items():
            aside = self.held.get((tier, "activations"), 0)
            states = self.transfer(tier, moved["optimizer_read"], moved["optimizer_write"] + moved["parameters_write"])
            forward[tier] = self.transfer(tier, moved["forward_read"] / accumulate, aside)
            read = (moved["backward_read"] + moved["accumulate_read"]) / accumulate + aside
            backward[tier] = self.transfer(tier, read, moved["gradients_write"] / accumulate)
            slipped[tier] = self.slips * states
            first[tier] = forward[tier] + states - slipped[tier] + self.transfer(tier, moved["gradients_read"], 0)
        return {"first": first, "forward": forward, "backward": backward, "slipped": slipped}

    def copies(self) -> tuple[list[int], list[bool]]:
        """The bytes of each whole unit, and whether its copy stays from a forward to its backward."""
        nbytes = [unit.nbytes(self.shape.parameter_dtype) for unit in self.sizes.units]
        return nbytes, stays(nbytes, [unit.encloses for unit in self.sizes.units], self.shape)

    def transfer(self, tier: str, read_bytes: float, write_bytes: float) -> float:
        return transfer_seconds(self.hardware, tier, read_bytes, write_bytes) or 0.0

    def by_unit(self, forward: float, backward: float) -> tuple[float, float, float, float]:
        """Seconds of the first forward, a later one and a backward, and of what the norm waits for after the last one.

        `forward`, `backward`: of compute. Checkpoints come back in a backward, a block's like another's. Where a kind
        is on the device in part, it is the part of the first units.
        """
        sizes, shape = self.sizes, self.shape
        mixed = self.hardware.rank_rate("link_mixed_gbps")
        slower = 1.0 if mixed is None else min(1.0, mixed / (self.link + self.link_out))
        share = 1 / max(1, sizes.compute_numel)
        works = [unit.compute_numel * (INPUT_FLOP + WEIGHT_FLOP * unit.trained) for unit in sizes.units]
        back_share = 1 / max(1, sum(works))
        nbytes, staying = self.copies()
        parameters = self._units_off_device("parameters", nbytes)
        trained = [unit.trained_numel for unit in sizes.units]
        gradients, states = self._units_off_device("gradients", trained), self._units_off_device("optimizer", trained)
        element = self.beside / max(1.0, sum(states))
        reduced, itemsize = shape.reduce_dtype.itemsize, shape.parameter_dtype.itemsize
        added = reduced + (0 if shape.arriving == 1 else 2 * FP32_BYTES)
        aside = self.off_device("activations") / max(1, sizes.blocks)
        arrived = shape.arriving / shape.accumulate
        units = [
            UnitWork(
                forward=forward * unit.compute_numel * share,
                backward=backward * work * back_share,
                update=element * updated,
                # What lives on the device and is updated on the host crosses after its update, as what lives there.
                upload=max(used, updated * itemsize) / self.link,
                upload_again=(used * (not stay) + aside * unit.is_block) / self.link / slower,
                download=arrived * reduces * reduced / self.link_out / slower,
                add=reduces * added / self.host_update,
                nbytes=size,
            )
            for unit, size, stay, work, used, reduces, updated in zip(
                sizes.units, nbytes, staying, works, parameters, gradients, states, strict=True
            )
        ]
        units = _opened(units, sizes)
        back, tail = backward_seconds(units, shape.prefetch_bytes, LANDING_BUFFERS)
        first, later = (forward_seconds(units, shape.prefetch_bytes, updated=updated) for updated in (True, False))
        return first, later, back, tail

    def _units_off_device(self, kind: str, of_units: Sequence[int]) -> list[float]:
        """What of each unit's bytes or elements is not on the device, which has the first ones. One shard's."""
        numels = [number / self.shape.shard_count for number in of_units]
        device = self.held.get((Tier.DEVICE, kind), 0)
        total = device + self.off_device(kind)
        edge = sum(numels) * (device / total if total else 1.0)
        found, start = [], 0.0
        for numel in numels:
            found.append(min(numel, max(0.0, start + numel - edge)))
            start += numel
        return found


def _opened(units: Sequence[UnitWork], sizes: ModelSizes) -> list[UnitWork]:
    """As they are used: a unit that encloses the others is there first, and computes (its head) and closes last."""
    roots = [work for work, unit in zip(units, sizes.units, strict=True) if unit.encloses]
    others = [work for work, unit in zip(units, sizes.units, strict=True) if not unit.encloses]
    first = [replace(work, forward=0.0, backward=0.0, upload_again=0.0) for work in roots]
    last = [UnitWork(work.forward, work.backward, upload_again=work.upload_again) for work in roots]
    return [*first, *others, *last]

"""Seconds: how long a step takes on a given hardware, what of it is exposed, and from how many tokens on nothing is.

Owns the arithmetic of windows. Pure: takes bytes from `accounting` and rates from `hardware`.

[Note: What hides where]
    forward    of the first micro-batch: states in and out, the update itself, parameters of the forward
    backward   parameters read again, gradients out; and as much of the state traffic as fits the slots, since the
               reads of the first tiles may start, and the writes of the last may end, in backward
Within a window the resources (compute, nvme, link, network, the CPU's update) work side by side, so it lasts as long
as its busiest one. Where the CPU is the compute device its update competes with compute: I/O hides, arithmetic adds.
Where compute is apart from the host the windows have ends as well, which nothing hides: `timetable` has them by unit.
A window is w FLOP per parameter and token: 2 for a forward, 4 for a backward, 6 for one that recomputes. Traffic of B
bytes per parameter hides in it iff tokens ≥ B·F/(w·BW).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zero_core.memory import FP32_BYTES

from ..tiles.footprint import LANDING_BUFFERS
from .accounting import Account, Held, Shape
from .hardware import Hardware
from .sizes import ModelSizes
from .timetable import UnitWork, backward_seconds, forward_seconds

FORWARD_FLOP = 2
BACKWARD_FLOP = 4


@dataclass(frozen=True)
class Prediction:
    """Seconds of one rank's optimizer step. `busy`: seconds of work by resource, hidden or not."""

    step_seconds: float
    compute_seconds: float
    update_seconds: float
    exposed_seconds: float  # step less compute: what overlap does not hide, the CPU's update included
    hides_from_tokens: int | None  # of one rank's step; None: no compute to hide behind. Activations and ends apart
    busy: Mapping[str, float]


@dataclass(frozen=True)
class _Rates:
    """Bytes (FLOP) a second of one rank. Infinite where the resource is not used."""

    flops: float
    link: float  # host to device
    link_out: float
    network: float
    host_update: float
    device_update: float


def predict(
    sizes: ModelSizes,
    shape: Shape,
    account: Account,
    held: Held,
    hardware: Hardware,
    *,
    tokens: int,
    recomputed: float = 0.0,
    slot_fraction: float = 0.0,
) -> Prediction | None:
    """Predict one step of `tokens` per rank. None where the hardware lacks a figure that this account needs.

    `held`: bytes by tier and kind. `recomputed`: share of the compute that backward does again. `slot_fraction`: share
    of the state bytes on nvme that the slots hold at once.
    """
    spilled = {tier: held.get((tier, "activations"), 0) for tier in ("host", "nvme")}
    rates = _rates(account, shape, hardware)
    if rates is None or nvme_seconds(hardware, spilled.get("nvme", 0), 0) is None:
        return None
    token_flop = sizes.compute_numel / rates.flops  # seconds per FLOP-per-parameter and token
    micro = tokens / shape.accumulate
    forward = FORWARD_FLOP * token_flop * micro
    backward = (BACKWARD_FLOP + FORWARD_FLOP * recomputed) * token_flop * micro
    compute = (forward + backward) * shape.accumulate
    on_host = account.updated.get("host", 0) / rates.host_update
    update = on_host + account.updated.get("device", 0) / rates.device_update
    windows = _windows(sizes, shape, account, held, hardware, rates, slot_fraction, spilled)
    arithmetic = update if hardware.shares_host else update - on_host  # takes turns with compute
    behind = 0.0 if hardware.shares_host else on_host  # runs beside it
    passes = (forward, forward, backward, 0.0)
    if not hardware.shares_host:
        away = spilled.get("nvme", 0) + spilled.get("host", 0)
        passes = _by_unit(sizes, shape, account, held, hardware, rates, forward, backward, away)
    first = max(passes[0] + arithmetic, behind, *windows["first"].values())
    later = max(passes[1], *windows["forward"].values())
    lanes = ("nvme", "link", "network") if hardware.shares_host else ("nvme", "network")  # the link is in `passes`
    back = max(passes[2], *(windows["backward"][lane] for lane in lanes))
    step = first + (shape.accumulate - 1) * later + shape.accumulate * back + passes[3]
    # State traffic that the slots let slip into backward must find room there; what does not waits in the forward.
    overflow = max(0.0, windows["slipped"]["nvme"] - (back * shape.accumulate - _total(windows, shape)))
    step += overflow
    return Prediction(
        step_seconds=step,
        compute_seconds=compute,
        update_seconds=update,
        exposed_seconds=step - compute,
        hides_from_tokens=_hides_from(
            _windows(sizes, shape, account, held, hardware, rates, slot_fraction, {}),
            behind,
            token_flop,
            recomputed,
            shape.accumulate,
        ),
        busy={
            "compute": compute,
            "update": update,
            "nvme": windows["slipped"]["nvme"] + windows["first"]["nvme"] + _later(windows, shape, "nvme"),
            "link": windows["first"]["link"] + _later(windows, shape, "link"),
            "network": windows["first"]["network"] + _later(windows, shape, "network"),
        },
    )


def nvme_seconds(hardware: Hardware, read_bytes: float, write_bytes: float) -> float | None:
    """Seconds that one rank's share of its nvme paths takes for these bytes; None: rates not known."""
    if not read_bytes and not write_bytes:
        return 0.0
    read, write = hardware.rank_rate("nvme_read_gbps"), hardware.rank_rate("nvme_write_gbps")
    mixed = hardware.rank_rate("nvme_mixed_gbps")
    if read is None or write is None:
        return None
    if mixed is None:
        return read_bytes / read + write_bytes / write
    return max(read_bytes / read, write_bytes / write, (read_bytes + write_bytes) / mixed)


def _rates(account: Account, shape: Shape, hardware: Hardware) -> _Rates | None:
    def rate(name: str, used: bool) -> float | None:
        return hardware.rank_rate(name) if used else float("inf")

    on_device = bool(account.updated.get("device"))
    found = (
        rate("tflops", True),
        rate("link_gbps", not hardware.shares_host),
        rate("link_out_gbps", not hardware.shares_host),
        rate("network_gbps", shape.shard_count > 1),
        rate("update_gbps", bool(account.updated.get("host")) or (on_device and hardware.shares_host)),
        rate("update_gbps" if hardware.shares_host else "device_gbps", on_device),
    )
    nvme = nvme_seconds(hardware, account.read_bytes("nvme"), account.write_bytes("nvme"))
    if None in found or nvme is None:
        return None
    return _Rates(*(r for r in found if r is not None))


def _by_unit(
    sizes: ModelSizes,
    shape: Shape,
    account: Account,
    held: Held,
    hardware: Hardware,
    rates: _Rates,
    forward: float,
    backward: float,
    away: int,
) -> tuple[float, float, float, float]:
    """Seconds of the first forward, a later one and a backward, and of what the norm waits for after the last one.

    `forward`, `backward`: of compute. `away`: bytes of checkpoints that come back in a backward, a block like another.
    Where a kind is on the device in part, it is the part of the first units.
    """
    mixed = hardware.rank_rate("link_mixed_gbps")
    slower = 1.0 if mixed is None else min(1.0, mixed / (rates.link + rates.link_out))
    share = 1 / max(1, sizes.compute_numel)
    numels = [unit.numel / shape.shard_count for unit in sizes.units]
    below = {kind: _below(held, kind, numels) for kind in ("parameters", "gradients", "optimizer")}
    element = account.updated.get("host", 0) / rates.host_update / max(1.0, sum(below["optimizer"]))
    added = shape.reduce_dtype.itemsize + (0 if shape.arriving == 1 else 2 * FP32_BYTES)
    itemsize, aside = shape.parameter_dtype.itemsize, away / max(1, sizes.blocks)
    arrived = shape.arriving / shape.accumulate
    units = [
        UnitWork(
            forward=forward * unit.compute_numel * share,
            backward=backward * unit.compute_numel * share,
            update=element * states,
            # What lives on the device and is updated below crosses after its update, as what lives below does.
            upload=max(parameters, states) * itemsize / rates.link,
            upload_again=(parameters * itemsize + aside * unit.is_block) / rates.link / slower,
            download=arrived * gradients * shape.reduce_dtype.itemsize / rates.link_out / slower,
            add=gradients * added / rates.host_update,
            nbytes=unit.numel * itemsize,
        )
        for unit, parameters, gradients, states in zip(
            sizes.units, below["parameters"], below["gradients"], below["optimizer"], strict=True
        )
    ]
    units = _opened(units, sizes)
    back, tail = backward_seconds(units, shape.prefetch_bytes, LANDING_BUFFERS)
    first, later = (forward_seconds(units, shape.prefetch_bytes, updated=updated) for updated in (True, False))
    return first, later, back, tail


def _opened(units: Sequence[UnitWork], sizes: ModelSizes) -> list[UnitWork]:
    """As they are used: a unit that encloses the others is there first, and computes (its head) and closes last."""
    roots = [work for work, unit in zip(units, sizes.units, strict=True) if unit.encloses]
    others = [work for work, unit in zip(units, sizes.units, strict=True) if not unit.encloses]
    first = [replace(work, forward=0.0, backward=0.0, upload_again=0.0) for work in roots]
    last = [UnitWork(work.forward, work.backward, upload_again=work.upload_again) for work in roots]
    return [*first, *others, *last]


def _below(held: Held, kind: str, numels: Sequence[float]) -> list[float]:
    """Elements of each unit that are not on the device, which has the first ones."""
    total = sum(nbytes for (_, each), nbytes in held.items() if each == kind)
    edge = sum(numels) * (held.get(("device", kind), 0) / total if total else 1.0)
    found, start = [], 0.0
    for numel in numels:
        found.append(min(numel, max(0.0, start + numel - edge)))
        start += numel
    return found


def _windows(
    sizes: ModelSizes,
    shape: Shape,
    account: Account,
    held: Held,
    hardware: Hardware,
    rates: _Rates,
    slot_fraction: float,
    spilled: Mapping[str, int],
) -> dict[str, dict[str, float]]:
    """Seconds of each resource in the first forward, a later forward and a backward, and what slips to backward."""
    moved, accumulate = account.moved["nvme"], shape.accumulate
    itemsize = shape.parameter_dtype.itemsize
    below = sum(held.get((tier, "parameters"), 0) for tier in ("host", "nvme"))
    gradients_below = sum(held.get((tier, "gradients"), 0) for tier in ("host", "nvme"))
    others = (shape.shard_count - 1) / shape.shard_count
    gather = sizes.numel * itemsize * others / rates.network
    states = nvme_seconds(hardware, moved["optimizer_read"], moved["optimizer_write"] + moved["parameters_write"]) or 0
    update_gradients = nvme_seconds(hardware, moved["gradients_read"], 0) or 0
    slips, narrow = min(1.0, slot_fraction), shape.reduce_dtype.itemsize / shape.gradient_itemsize
    aside, away = spilled.get("nvme", 0), spilled.get("nvme", 0) + spilled.get("host", 0)
    mixed = hardware.rank_rate("link_mixed_gbps") or float("inf")
    arrived = shape.arriving / accumulate  # the share of backwards that end in a reduction
    up, down = below + away, gradients_below * narrow * arrived  # bytes of a backward
    stream = nvme_seconds(hardware, moved["forward_read"] / accumulate, aside) or 0
    gradient_io = nvme_seconds(
        hardware,
        (moved["backward_read"] + moved["accumulate_read"]) / accumulate + aside,
        moved["gradients_write"] / accumulate,
    )
    forward = {"nvme": stream, "link": max(below / rates.link, away / rates.link_out), "network": gather}
    return {
        "first": {**forward, "nvme": stream + (1 - slips) * states + update_gradients},
        "forward": forward,
        "backward": {
            "nvme": gradient_io or 0.0,
            "link": max(up / rates.link, down / rates.link_out, (up + down) / mixed),  # full duplex
            "network": gather * (1 + arrived),
        },
        "slipped": {"nvme": slips * states, "link": 0.0, "network": 0.0},
    }


def _later(windows: Mapping[str, Mapping[str, float]], shape: Shape, resource: str) -> float:
    return (shape.accumulate - 1) * windows["forward"][resource] + shape.accumulate * windows["backward"][resource]


def _total(windows: Mapping[str, Mapping[str, float]], shape: Shape) -> float:
    return shape.accumulate * windows["backward"]["nvme"]


def _hides_from(
    windows: Mapping[str, Mapping[str, float]], behind: float, token_flop: float, recomputed: float, accumulate: int
) -> int | None:
    """Tokens of a step from which every transfer, and an update beside compute, is hidden."""
    if not token_flop:
        return None
    forward, backward = FORWARD_FLOP * token_flop, (BACKWARD_FLOP + FORWARD_FLOP * recomputed) * token_flop
    need_forward = max(behind, *windows["first"].values()) / forward
    need_backward = max(windows["backward"].values()) / backward
    slack = (windows["slipped"]["nvme"] / accumulate + windows["backward"]["nvme"]) / backward
    return -int(-max(need_forward, need_backward, slack) * accumulate // 1)

"""Explains running out of memory in a step: the bytes asked for, the plan's bytes on that tier, and settings that help.

Owns the wording. It frees nothing and retries nothing: after such an error the step is lost, not the process.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from .core import lent_bytes
from .errors import OffloadError, gib
from .layout.footprint import KINDS, STATE_KINDS
from .layout.store_plan import slots_of_units
from .planning.budgets import contents, moved, slower, unsharded_bytes
from .planning.hardware import FRAGMENTS
from .planning.planner import Plan
from .planning.traffic import Shape
from .tier import Tier

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_AMOUNT = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_SAID = {  # amounts in the messages of torch's allocators
    "asked": rf"[Tt]ried to allocate {_AMOUNT}",
    "free": rf"of which {_AMOUNT} is free",
    "allocated": rf"{_AMOUNT} is allocated by PyTorch",
    "fragments": rf"{_AMOUNT} is reserved by PyTorch but unallocated",
}


class OutOfMemoryError(OffloadError, torch.OutOfMemoryError):
    """A tier had no room for a request of a step. `tier`: device or host. `asked_bytes`: None if the error lacks it."""

    def __init__(self, text: str, tier: str, asked_bytes: int | None) -> None:
        super().__init__(text)
        self.tier, self.asked_bytes = tier, asked_bytes


@contextmanager
def explained(plan: Plan) -> Iterator[None]:
    """A context for steps: running out of device or host memory raises `OutOfMemoryError` with advice from `plan`.

    `with zero_offload.explained(plan): loss.backward(); optimizer.step()`. The original is chained. The advice
    names arguments of `zero_offload.plan`, which are also those of `TieredStore`, `offload_activations` and
    `zero_core.shard`.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, OffloadError) or not is_out_of_memory(error):
            raise
        tier = Tier.DEVICE if isinstance(error, torch.OutOfMemoryError) else Tier.HOST
        said = amounts(str(error))
        raise OutOfMemoryError(_text(plan, tier, said, error), tier, said.get("asked")) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out. torch has a class for a full device; on the CPU it raises a RuntimeError that says so."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def amounts(text: str) -> dict[str, int]:
    """Bytes that torch's message names: asked, free, allocated, fragments."""
    found = {name: re.search(pattern, text) for name, pattern in _SAID.items()}
    return {name: int(float(match[1]) * _UNITS[match[2]]) for name, match in found.items() if match}


def _text(plan: Plan, tier: Tier, said: Mapping[str, int], error: BaseException) -> str:
    shared = plan.budgets is None or plan.budgets.shared
    where = Tier.HOST if shared else tier
    tiers = (Tier.DEVICE, Tier.HOST) if shared else (tier,)
    if "asked" in said:
        asked = f"{gib(said['asked'])} more were asked for"
    else:
        asked = str(error).strip() or type(error).__name__
    known = {"allocated": "{} are in tensors", "fragments": "{} in fragments", "free": "{} are free"}
    now = ", ".join(phrase.format(gib(said[name])) for name, phrase in known.items() if name in said)
    facts = "; ".join(filter(None, (asked, now, _given(plan, where, tiers), _absent(plan, where, said))))
    return f"out of memory on the {where} tier: {facts}; save memory with {', or '.join(_ways(plan, tiers, said))}"


def _given(plan: Plan, where: str, tiers: tuple[Tier, ...]) -> str:
    """ "zero_offload.plan expected 12.1 GiB of a budget of 79.0 GiB (activations 10.3 GiB, buffers 1.8 GiB)"."""
    parts = {kind: sum(plan.bytes_of(tier, kind) for tier in tiers) for kind in (*KINDS, "activations")}
    budget = plan.budgets.of(where) if plan.budgets else None
    return (
        f"zero_offload.plan expected {gib(sum(parts.values()))}"
        + (f" of a budget of {gib(budget)}" if budget else "")
        + (f" ({contents(parts)})" if any(parts.values()) else "")
    )


def _absent(plan: Plan, where: str, said: Mapping[str, int]) -> str:
    """What to do where the device ran out well below the plan's budget."""
    budget = (plan.budgets.of(where) if plan.budgets else None) or 0
    had = said.get("allocated", budget) + said.get("fragments", 0)
    if where != Tier.DEVICE or had + said.get("asked", 0) > (1 - FRAGMENTS) * budget:
        return ""
    return (
        f"{gib(budget - had)} of the budget are not available. Another process may use the device: end it. Or the "
        f"device is smaller than device_gib={plan.hardware.device_gib if plan.hardware else 0:g}: give its real size"
    )


def _ways(plan: Plan, tiers: tuple[Tier, ...], said: Mapping[str, int]) -> list[str]:
    """Settings to change, the largest gain first, with the bytes gained where the plan knows them."""
    gains: list[tuple[int, str]] = []
    next_tier = slower(tiers[-1])
    held = {kind: sum(plan.bytes_of(tier, kind) for tier in tiers) for kind in STATE_KINDS}
    for kind in STATE_KINDS:
        kinds, arguments = moved(kind, next_tier, held, discrete=tiers == (Tier.DEVICE,))
        gain = sum(held[each] for each in kinds)
        gains.append((gain if held[kind] else 0, f"{arguments} (saves {gib(gain)})"))
    activations = sum(plan.bytes_of(tier, "activations") for tier in tiers)
    gains.append((activations // 2, f"half the tokens a micro-batch (saves {gib(activations // 2)})"))
    policy = _next_policy(plan, tiers)
    if policy:  # worth more than half where blocks are kept
        gains.append((activations // 2 + 1, f'activations="{policy}"'))
    gains.append((_prefetched_bytes(plan, tiers), "prefetch_bytes=0"))
    gains.append((plan.shape.resident_bytes, f"resident_bytes=0 (saves {gib(plan.shape.resident_bytes)})"))
    ways = list(dict.fromkeys(text for gain, text in sorted(gains, key=lambda each: -each[0]) if gain > 0))
    if said.get("fragments", 0) > said.get("asked", 0) > 0:
        ways.insert(0, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (the fragments are large enough)")
    return ways or ["more ranks with stage=3, or smaller units (TiledLinear)"]


def _prefetched_bytes(plan: Plan, tiers: tuple[Tier, ...]) -> int:
    """Bytes that `prefetch_bytes=0` saves: units that are gathered ahead, and their slots on the host."""
    units, shards = plan.store.units, plan.shape.shard_count
    nbytes = [unit.spec.unit_numel(shards) * unit.spec.dtype.itemsize for unit in units]

    def held(shape: Shape) -> int:
        depths = [unit.spec.depth for unit in units]
        gathered = unsharded_bytes(nbytes, [unit.spec.encloses for unit in units], shape, depths)
        ahead = lent_bytes(nbytes, shape.prefetch_bytes, shape.resident_bytes, shards)
        own, shared, largest = slots_of_units(units, ahead, shards)
        slots = sum(units[i].parameter_bytes for i in own) + shared * largest
        return gathered * bool(plan.bytes_of(Tier.DEVICE, "buffers")) + slots * (Tier.HOST in tiers)

    return held(plan.shape) - held(replace(plan.shape, prefetch_bytes=0))


def _next_policy(plan: Plan, tiers: tuple[Tier, ...]) -> str:
    """A policy that keeps fewer bytes on these tiers than the most common one of the plan; "": there is none."""
    if not plan.activations:
        return ""
    common = Counter(plan.activations).most_common(1)[0][0]
    if common == "keep":
        return "recompute"
    return str(slower(tiers[-1])) if common in ("recompute", tiers[-1]) else ""

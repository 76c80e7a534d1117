"""Turns a placement, a tier or fractions of tiers, into the tier of each tile.

Pure: counts in, tiers out. Not here: a placement's bytes (in footprint.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ..errors import PlacementError
from ..tier import TIERS, Tier

Placement = str | Mapping[str, float]


def shares(placement: Placement, kind: str, tiers: Sequence[Tier] = TIERS) -> dict[Tier, float]:
    """The fraction on each of `tiers`, in their order, which is fast to slow.

    Raises PlacementError naming `kind`, the value, and values that would do.
    """
    known = ", ".join(f'"{tier}"' for tier in tiers)
    if isinstance(placement, str):
        placement = {placement: 1.0}
    if not isinstance(placement, Mapping) or not placement:
        raise PlacementError(
            f'{kind}={placement!r} is neither a tier ({known}) nor fractions {{"host": 0.37, "nvme": 0.63}}'
        )
    found = dict.fromkeys(tiers, 0.0)
    for name, share in placement.items():
        tier = Tier(name)
        if tier not in found:
            raise PlacementError(f"{kind}: {name!r} is not a tier; known: {known}")
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not math.isfinite(share) or share < 0:
            raise PlacementError(f"{kind}: the fraction of {tier} is {share!r}; it is a number from 0 to 1")
        found[tier] = float(share)
    if not math.isclose(sum(found.values()), 1.0, abs_tol=1e-6):
        raise PlacementError(f"{kind}: the fractions {dict(placement)} add up to {sum(found.values()):g}, not to 1")
    return found


def place(placement: Placement, sizes: Sequence[int], kind: str, tiers: Sequence[Tier] = TIERS) -> tuple[Tier, ...]:
    """The tier of each tile, given the tiles' sizes in their order: the first tiles are in the fastest of `tiers`.

    A tile's middle decides its tier, so that 0.37 of equal tiles is the first 37 % of them, to half a tile.

    Examples:
        >>> import zero_offload
        >>> zero_offload.place({"host": 0.25, "nvme": 0.75}, [100] * 4, "optimizer")
        ('host', 'nvme', 'nvme', 'nvme')
    """
    fractions = shares(placement, kind, tiers)
    total, found, before = sum(sizes), [], 0
    for size in sizes:
        found.append(tier_at((before + size / 2) / total if total else 0.0, fractions))
        before += size
    return tuple(found)


def tier_at(middle: float, fractions: Mapping[Tier, float]) -> Tier:
    """The tier of a tile whose middle is at the fraction `middle` of all elements."""
    bounds = zip(fractions, accumulate(fractions.values()), strict=True)
    return next(tier for tier, bound in bounds if middle < bound or math.isclose(bound, 1.0, abs_tol=1e-6))


def device_share(placement: Placement) -> float:
    """The fraction on the device."""
    return placement.get(Tier.DEVICE, 0.0) if isinstance(placement, Mapping) else float(placement == Tier.DEVICE)


def check_device_shares(parameters: Placement, gradients: Placement, optimizer: Placement) -> None:
    """Raises PlacementError unless units whose states are on a discrete device have everything else there too."""
    states = device_share(optimizer)
    if not math.isclose(device_share(gradients), states, abs_tol=1e-6):
        raise PlacementError(
            f"gradients={gradients!r} and optimizer={optimizer!r}: on a discrete device a unit's gradient is where its "
            f'states are; give both the same share of "device" ({states:g})'
        )
    if device_share(parameters) < states - 1e-6:
        raise PlacementError(
            f"parameters={parameters!r} and optimizer={optimizer!r}: states on the device need their parameters there; "
            f'give parameters at least {states:g} of "device"'
        )

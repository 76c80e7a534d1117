"""How far a median of few values can be trusted."""

from __future__ import annotations

import math

__all__ = ["interval_of_median"]


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Order statistics that hold the median with at least 95 %, as in the sign test; under 6 values: all of them."""
    ordered, n = sorted(values), len(values)
    tail = 0.0
    for k in range(n // 2):
        tail += math.comb(n, k) / 2**n
        if tail > 0.025:
            return ordered[max(0, k - 1)], ordered[n - max(1, k)]
    return ordered[0], ordered[-1]

"""How far the median, or the mean ratio, of few measurements can be trusted."""

import math
import statistics
from collections.abc import Iterable

_STUDENT = (  # for 95 %, two-sided, with 3 to 19 degrees of freedom, so for 4 to 20 pairs
    3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201,
    2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
)  # fmt: skip


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Order statistics that hold the median with at least 95 %, as in the sign test; under 6 values: all of them."""
    ordered, n = sorted(values), len(values)
    tail = 0.0
    for k in range(n // 2):
        tail += math.comb(n, k) / 2**n
        if tail > 0.025:
            return ordered[max(0, k - 1)], ordered[n - max(1, k)]
    return ordered[0], ordered[-1]


def mean_ratio(values: Iterable[float], others: Iterable[float]) -> list[float]:
    """Geometric mean of value / other over pairs, then the ends of its 95 % interval if there are 4 pairs or more.

    The interval is Student's, of the ratios' logarithms. Above 20 pairs it is a little wider than it need be.
    """
    logs = [math.log(value / other) for value, other in zip(values, others, strict=True)]
    mean = statistics.mean(logs)
    if len(logs) < 4:
        return [round(math.exp(mean), 3)]
    half = _STUDENT[min(len(logs) - 4, len(_STUDENT) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return [round(math.exp(value), 3) for value in (mean, mean - half, mean + half)]

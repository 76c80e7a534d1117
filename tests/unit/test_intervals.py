"""Intervals of the benchmarks: that of `mean_ratio` holds 95 % of Student's distribution, not of the normal."""

import math

import pytest

from tests.benchmarks.intervals import interval_of_median, mean_ratio


def within(t: float, freedom: int, steps: int = 2000) -> float:
    """The probability of -t to t, by Simpson's rule over the density."""
    scale = math.gamma((freedom + 1) / 2) / math.sqrt(freedom * math.pi) / math.gamma(freedom / 2)
    density = [scale * (1 + (t * n / steps) ** 2 / freedom) ** (-(freedom + 1) / 2) for n in range(steps + 1)]
    weighted = density[0] + density[-1] + 4 * sum(density[1:-1:2]) + 2 * sum(density[2:-1:2])
    return 2 * weighted * t / steps / 3


@pytest.mark.parametrize("pairs", [*range(4, 21), 40])
def test_the_interval_of_so_many_pairs_holds_95_per_cent(pairs):
    logs = [0.3 * (-1) ** n for n in range(pairs)]  # wide, as what is returned has three decimals
    mean, low, high = mean_ratio([2 * math.exp(value) for value in logs], [2.0] * pairs)
    centre = sum(logs) / pairs
    error = math.sqrt(sum((value - centre) ** 2 for value in logs) / (pairs - 1) / pairs)
    held = within(math.log(high / low) / 2 / error, pairs - 1)
    assert mean == round(math.exp(centre), 3)
    assert held == pytest.approx(0.95, abs=1e-3) if pairs <= 20 else 0.95 < held < 0.96


def test_fewer_than_four_pairs_have_no_interval_and_both_sides_as_many_values():
    assert mean_ratio([1.0, 4.0, 8.0], [1.0, 1.0, 1.0]) == [round(32 ** (1 / 3), 3)]
    with pytest.raises(ValueError):
        mean_ratio([1.0, 2.0], [1.0])


def test_the_interval_of_a_median_leaves_out_only_what_it_may():
    assert interval_of_median([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval_of_median([float(k) for k in range(8)]) == (0.0, 7.0)  # 2 / 256 outside
    assert interval_of_median([float(k) for k in range(9)]) == (1.0, 7.0)  # 20 / 512 outside

"""Intervals of the benchmarks: that of `mean_ratio` is Student's, and not the normal distribution's."""

import math

import pytest

from tests.benchmarks.intervals import interval_of_median, mean_ratio


@pytest.mark.parametrize("pairs, student", [(4, 3.182), (12, 2.201), (20, 2.093), (40, 2.093)])
def test_the_interval_is_so_many_standard_errors_to_each_side(pairs, student):
    logs = [0.3 * (-1) ** n for n in range(pairs)]  # wide, as what is returned has three decimals
    error = 0.3 / math.sqrt(pairs - 1)
    found = mean_ratio([2 * math.exp(value) for value in logs], [2.0] * pairs)
    assert found == [round(math.exp(value), 3) for value in (0, -student * error, student * error)]


def test_fewer_than_four_pairs_have_no_interval_and_both_sides_as_many_values():
    assert mean_ratio([1.0, 4.0, 8.0], [1.0, 1.0, 1.0]) == [round(32 ** (1 / 3), 3)]
    with pytest.raises(ValueError):
        mean_ratio([1.0, 2.0], [1.0])


def test_the_interval_of_a_median_leaves_out_only_what_it_may():
    assert interval_of_median([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval_of_median([float(k) for k in range(8)]) == (0.0, 7.0)  # 2 / 256 outside
    assert interval_of_median([float(k) for k in range(9)]) == (1.0, 7.0)  # 20 / 512 outside

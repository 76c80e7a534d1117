"""Patterns: shares, evenness, and the sizes of the files."""

from __future__ import annotations

import pytest

from zero_nvme.striping import bytes_per_path, pattern_of


@pytest.mark.parametrize(
    ("weights", "pattern"),
    [([3.3], [0]), ([1, 1], [0, 1]), ([2, 1], [0, 1, 0]), ([1, 1, 1], [0, 1, 2]), ([3, 1], [0, 0, 1, 0])],
)
def test_patterns(weights, pattern):
    assert pattern_of(weights) == pattern


def test_shares_are_close_and_nobody_is_left_out():
    for weights in ([5.1, 4.9], [7, 2, 1], [100, 1], [1.7, 1.1, 0.4, 2.9]):
        pattern = pattern_of(weights)
        assert set(pattern) == set(range(len(weights)))
        for path, weight in enumerate(weights):
            assert abs(pattern.count(path) / len(pattern) - weight / sum(weights)) < 1 / 16


def test_bad_weights():
    for weights in ([], [1, 0], [1, -1]):
        with pytest.raises(ValueError, match="positive"):
            pattern_of(weights)


def test_sizes_hold_every_unit():
    pattern, unit = [0, 1, 0], 8192
    assert bytes_per_path(unit * 7 + 1, pattern, unit, 2) == [5 * unit, 3 * unit]
    assert bytes_per_path(100, [0], unit, 1) == [100]
    for nbytes in range(0, 20 * unit, 1000):
        sizes = bytes_per_path(nbytes, pattern, unit, 2)
        assert nbytes <= sum(sizes) < nbytes + unit

"""Spreads bytes over paths: turns weights into a pattern and computes the size of each path's file. Integers only."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 16  # units; weights are honoured to about 1/16


def pattern_of(weights: Sequence[float]) -> list[int]:
    """Returns one period of units as indices of paths, spread evenly: weights [2, 1] give [0, 1, 0].

    Raises ValueError for a weight that is not positive.
    """
    if not weights or min(weights) <= 0:
        raise ValueError(f"weights={list(weights)} must all be positive, one for each path")
    if len(weights) == 1:
        return [0]
    best: list[int] = []
    best_error = float("inf")
    total = sum(weights)
    for period in range(len(weights), max(MAX_PERIOD, 2 * len(weights)) + 1):
        counts = [max(1, round(weight / total * period)) for weight in weights]
        length = sum(counts)
        error = sum(abs(count / length - weight / total) for count, weight in zip(counts, weights, strict=True))
        if error < best_error - 1e-9:
            best, best_error = counts, error
    return _interleave(best)


def _interleave(counts: Sequence[int]) -> list[int]:
    """Interleaves by smooth weighted round-robin: the path that is furthest behind its share goes next."""
    credit = [0] * len(counts)
    pattern = []
    for _ in range(sum(counts)):
        for index, count in enumerate(counts):
            credit[index] += count
        chosen = max(range(len(counts)), key=lambda index: (credit[index], -index))
        credit[chosen] -= sum(counts)
        pattern.append(chosen)
    return pattern


def bytes_per_path(nbytes: int, pattern: Sequence[int], unit_bytes: int, paths: int) -> list[int]:
    """Returns the bytes that each path's file needs to hold the first `nbytes` of the striped range."""
    if len(pattern) == 1:
        return [nbytes]
    units = -(-nbytes // unit_bytes)
    whole, rest = divmod(units, len(pattern))
    return [(whole * pattern.count(path) + list(pattern[:rest]).count(path)) * unit_bytes for path in range(paths)]

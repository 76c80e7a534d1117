"""Few combinations of many factors: a pairwise cover, for matrices that are run whole only when asked."""

import itertools
from typing import Any


def everything(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Every combination of levels, by name."""
    return [dict(zip(factors, levels, strict=True)) for levels in itertools.product(*factors.values())]


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Few combinations that contain every pair of levels of every two factors. Greedy, deterministic."""

    def pairs(case: dict[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(factors, 2)}

    combinations = everything(factors)
    missing = set().union(*(pairs(case) for case in combinations))
    chosen = []
    while missing:
        best = max(combinations, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def identifier(case: dict[str, Any]) -> str:
    """A test's id."""
    return "-".join(str(level) for level in case.values())

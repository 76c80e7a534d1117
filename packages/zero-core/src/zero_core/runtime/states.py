"""Moves a unit from one state to the next, if the transition is declared for the state that it is in. Owns no state."""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import Enum
from typing import TypeVar

__all__ = ["moved"]

_State = TypeVar("_State", bound=Enum)


def moved(unit: str, old: _State, by: str, declared: Mapping[str, tuple[Container[_State], _State]]) -> _State:
    """Returns the state after the transition `by`, which `declared` maps to the states it may start from and its end.

    Raises AssertionError, naming the unit and both states, if it may not start from `old`.
    """
    sources, new = declared[by]
    assert old in sources, f"unit {unit!r} goes from {old} to {new} by {by}(), which is not declared"
    return new

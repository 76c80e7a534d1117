"""Moves a unit from one state to the next, if its enum declares that transition. Owns no state."""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import Enum
from typing import TypeVar

__all__ = ["moved"]

_State = TypeVar("_State", bound=Enum)


def moved(unit: str, old: _State, new: _State, declared: Mapping[_State, Container[_State]]) -> _State:
    """Returns `new`. Raises AssertionError, naming unit and states, if `declared[old]` does not have it."""
    assert new in declared[old], f"unit {unit!r} goes from {old} to {new}, which is not declared"
    return new

"""Declares the keys of a run: the default of each, and the values that checks.py accepts."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from omegaconf import MISSING

# The largest values guard against slips, such as a rate of 1e5 for 1e-5. The planner checks memory.
COUNT, SIZE, BYTES = 10**9, 10**6, 1 << 60


def number(default: Any, **bounds: float) -> Any:
    """Declares a key's default and its bounds, which checks.py enforces: at_least or above, and at_most or below."""
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={"bounds": bounds})


def one_of(*allowed: object, default: Any = MISSING) -> Any:
    """Declares a key's default and all its values, which checks.py enforces."""
    return field(default=default, metadata={"allowed": allowed})


def count(default: Any, most: int = COUNT) -> Any:
    """Declares a key that counts something, from 1 to `most`."""
    return number(default, at_least=1, at_most=most)

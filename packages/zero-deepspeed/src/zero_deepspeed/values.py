"""What values a key of a DeepSpeed JSON takes. Each check returns a value as it is meant, or raises ValueError."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = ["Check", "anything", "flag", "number", "numbers", "one_of", "text", "whole"]

Check = Callable[[Any], Any]


def whole(least: int = 0, *, exponent: bool = True) -> Check:
    """Takes an integer of at least `least`. exponent: also 5e8, which JSON reads as a float."""

    def check(value: Any) -> int:
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            if not exponent:
                raise ValueError(f"{value!r} is a float: write {int(value)}, without a point or an exponent")
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{value!r} must be an integer of at least {least}")
        return value

    return check


def number(least: float = 0.0, most: float = math.inf) -> Check:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            limits = f" of at least {least:g}" if most == math.inf else f" from {least:g} to {most:g}"
            raise ValueError(f"{value!r} is no number" + (limits if least > -math.inf else ""))
        if not math.isfinite(value):
            raise ValueError(f"{value!r} is not finite")
        return value

    return check


def numbers(count: int | None = None) -> Check:
    """Takes a list of numbers. count: how many; None: one number will do, too, as will one for each group."""

    def check(value: Any) -> Any:
        if count is None and not isinstance(value, (list, tuple)):
            return number(-math.inf)(value)
        if not isinstance(value, (list, tuple)) or count is not None and len(value) != count:
            raise ValueError(f"{value!r} is no list of {count or 'some'} numbers")
        return tuple(number(-math.inf)(item) for item in value)

    return check


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def one_of(*allowed: Any) -> Check:
    def check(value: Any) -> Any:
        wanted = value.lower() if isinstance(value, str) else value
        if wanted not in allowed or isinstance(wanted, bool) != any(isinstance(a, bool) for a in allowed):
            raise ValueError(f"{value!r} is none of {', '.join(map(repr, allowed))}")
        return wanted

    return check


def anything(value: Any) -> Any:
    return value

"""Replays random numbers of Python and numpy that a unit's forward drew, for its recomputation.

Not here: torch's own numbers (its checkpointing replays them), generators that a module keeps (in buffers.py).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["drawn_again", "random_states"]


def random_states() -> tuple[Any, Any]:
    """The states of Python's random numbers, and of numpy's if it is imported."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


@contextmanager
def drawn_again(states: tuple[Any, Any]) -> Iterator[None]:
    """A context in which the numbers after `states` are drawn again. Restores the global states afterwards."""
    now = random_states()
    try:
        _set(states)
        yield
    finally:
        _set(now)


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])

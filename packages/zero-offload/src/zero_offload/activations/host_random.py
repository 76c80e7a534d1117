"""Random numbers of Python and numpy, drawn by a unit's forward, which recomputation has to draw again.

Those of torch are replayed by its checkpointing, and those of a generator that a module keeps by `buffers`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["HostRandom"]


class HostRandom:
    """The states before each part of one call of a unit that draws such numbers."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}  # of the parts that drew some

    @contextmanager
    def first_run(self, k: int) -> Iterator[None]:
        before = _random_states()
        yield
        if _random_states() != before:
            self._before[k] = before

    @contextmanager
    def second_run(self, k: int) -> Iterator[None]:
        """Part k draws the numbers of its first run again, and the global states are as before afterwards."""
        if k not in self._before:
            yield
            return
        now = _random_states()
        try:
            _set_random_states(self._before[k])
            yield
        finally:
            _set_random_states(now)


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy.random")
    if numpy is None:
        return random.getstate(), None
    name, keys, *rest = numpy.get_state()
    return random.getstate(), (name, keys.tolist(), *rest)


def _set_random_states(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])

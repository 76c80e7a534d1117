"""Random numbers of Python and numpy, drawn by a unit's forward, which recomputation has to draw again.

Those of torch are replayed by its checkpointing, and those of a generator that a module keeps by `buffers`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["drawn_again", "random_states"]


def random_states() -> tuple[Any, Any]:
    """What Python draws next, and numpy, if it is imported."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


@contextmanager
def drawn_again(states: tuple[Any, Any]) -> Iterator[None]:
    """Inside, the numbers that followed `states` are drawn again. The global states are as before afterwards."""
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

"""The simulated device as these tests use it: its latency, the annotations of native code, races that fail a test.

Ranks import this module before they join; importing it registers device "sim".

Latency: each queued piece of work begins 200 us after the one before it at the earliest, and up to 400 us later by
chance, so that the host is far ahead of the device and two streams meet in any order. ZERO_SIM_LATENCY and
ZERO_SIM_SEED say otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LATENCY = "200:400"  # microseconds: fixed, and by chance
missing = ""  # why there is no simulated device; empty where there is one

os.environ.setdefault("ZERO_SIM_LATENCY", LATENCY)
try:
    import zero_sim
except Exception as error:
    missing = f"no simulated device: {error}"


def begin() -> None:
    """Let the detector see what native code does with memory, until the process ends."""
    if not missing:
        from tests.device.device_annotations import install

        install()


@contextmanager
def no_races() -> Iterator[None]:
    """Raises with every report if a race occurred inside, or before: in a fixture of wider scope."""
    with zero_sim.detect():
        yield


class CheckedRanks:
    """A pool in which every call fails where a race occurred in any rank."""

    def __init__(self, pool: Any) -> None:
        self.pool, self.size = pool, pool.size

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return self.pool.run(_checked, function, args, **options)

    def close(self) -> None:
        self.pool.close()


def _checked(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    begin()
    with no_races():
        return function(*args)

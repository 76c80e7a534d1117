"""The simulated device as these tests use it: its latency, the annotations of native code, races that fail a test.

Ranks import this module before they join; importing it registers device "sim".

Latency: each queued piece of work begins 200 us after the one before it at the earliest, and up to 400 us later by
chance, so that the host is far ahead of the device and two streams meet in any order. ZERO_SIM_LATENCY and
ZERO_SIM_SEED say otherwise.
"""

import os
from collections.abc import Callable
from typing import Any

LATENCY = "200:400"  # microseconds: fixed, and by chance
missing = ""  # why there is no simulated device; empty where there is one

os.environ.setdefault("ZERO_SIM_LATENCY", LATENCY)
try:
    import zero_sim
except Exception as error:
    missing = f"no simulated device: {error}"


def begin() -> None:
    """Let the detector see what native code does with memory, until the process ends. Twice is fine."""
    from tests.device.device_annotations import install

    install()


def take_races() -> list[Any]:
    """The races since the last call."""
    return zero_sim.take_races()


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
    with zero_sim.detect():
        return function(*args)

"""The exceptions of this package. Each text has the fact, the values and the way out."""

from __future__ import annotations

START_AGAIN = "start it again: a durable run goes on from its last step, another from its last checkpoint"

__all__ = [
    "START_AGAIN",
    "AsleepError",
    "BudgetError",
    "ClosedError",
    "GenerationError",
    "OffloadError",
    "PlacementError",
    "SwapError",
    "gib",
]


class OffloadError(Exception):
    """Whatever this package raises on purpose."""


class PlacementError(OffloadError, ValueError):
    """A placement, a tile size or a combination of them that cannot be."""


class BudgetError(OffloadError, MemoryError):
    """A tier is smaller than what was asked to be put there."""


class SwapError(OffloadError, OSError):
    """A read or a write of a tile failed; the text names file, offset and tile. The cause is chained."""


class ClosedError(OffloadError, RuntimeError):
    """The store was closed."""


class AsleepError(OffloadError, RuntimeError):
    """The store sleeps, or cannot sleep now."""


class GenerationError(OffloadError):
    """What an earlier process left on disk cannot be gone on from, or nothing can be left there for a later one."""


def gib(nbytes: int) -> str:
    """Bytes for people: "61.4 GiB", and "3.2 MiB" below a tenth of one."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 // 10 else f"{nbytes / 2**20:.1f} MiB"

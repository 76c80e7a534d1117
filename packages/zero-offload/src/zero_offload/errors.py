"""Defines the exceptions of this package. Each text has the fact, the values and the way out."""

from __future__ import annotations

CLOSED = "the TieredStore is closed: close it after the last use of its model"
START_AGAIN = "restart the run. With durable= the run continues after its last step, else from its last checkpoint"
LESS = 'put optimizer, gradients or parameters on "nvme". Or use fewer slots: set slots=3'


class OffloadError(Exception):
    """Base class of the errors that this package raises on purpose."""


class PlacementError(OffloadError, ValueError):
    """A placement or a tile size is invalid, or the two do not go together."""


class BudgetError(OffloadError, MemoryError):
    """A tier is too small for the values that were placed there."""


class SwapError(OffloadError, OSError):
    """A read or a write of a tile failed; the text names file, offset and tile. The cause is chained."""


class ClosedError(OffloadError, RuntimeError):
    """The store was closed."""


class AsleepError(OffloadError, RuntimeError):
    """The store sleeps, or cannot sleep now."""


class GenerationError(OffloadError):
    """A run cannot continue from the generations on disk, or cannot leave any there for a later process."""


def gib(nbytes: int) -> str:
    """Returns bytes as text: "61.4 GiB", and "3.2 MiB" below 0.1 GiB."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 // 10 else f"{nbytes / 2**20:.1f} MiB"

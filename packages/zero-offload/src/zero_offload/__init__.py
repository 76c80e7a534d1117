"""Host and NVMe tiers for models whose parameters, gradients and optimizer states do not fit on the device."""

from .errors import BudgetError, ClosedError, OffloadError, PlacementError, SwapError
from .footprint import StorePlan, plan_store
from .memory_store import MemoryByteStore
from .placement import place
from .protocols import ByteStore, Field, Ticket, UpdateStep
from .store import TieredStore
from .tier import Tier
from .timeline import Timeline
from .torch_step import TorchStep

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ByteStore",
    "ClosedError",
    "Field",
    "MemoryByteStore",
    "OffloadError",
    "PlacementError",
    "StorePlan",
    "SwapError",
    "Ticket",
    "Tier",
    "TieredStore",
    "Timeline",
    "TorchStep",
    "UpdateStep",
    "place",
    "plan_store",
]

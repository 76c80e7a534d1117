"""Host and NVMe tiers for models whose parameters, gradients and optimizer states do not fit on the device."""

from .activations import ActivationError, Activations, offload_activations
from .advice import OutOfMemoryError, explained
from .budgets import PlanError
from .errors import BudgetError, ClosedError, OffloadError, PlacementError, SwapError
from .footprint import StorePlan, plan_store
from .hardware import Hardware, HardwareError, available_host_bytes
from .memory_store import MemoryByteStore
from .placement import place
from .planner import Plan, fits, plan
from .probing import probe
from .protocols import ByteStore, Field, Ticket, UpdateStep
from .sizes import ModelSizes, ParameterSizes, UnitSizes
from .store import TieredStore
from .tier import Tier
from .timeline import Timeline
from .torch_step import TorchStep

__version__ = "0.1.0"

__all__ = [
    "ActivationError",
    "Activations",
    "BudgetError",
    "ByteStore",
    "ClosedError",
    "Field",
    "Hardware",
    "HardwareError",
    "MemoryByteStore",
    "ModelSizes",
    "OffloadError",
    "OutOfMemoryError",
    "ParameterSizes",
    "PlacementError",
    "Plan",
    "PlanError",
    "StorePlan",
    "SwapError",
    "Ticket",
    "Tier",
    "TieredStore",
    "Timeline",
    "TorchStep",
    "UnitSizes",
    "UpdateStep",
    "available_host_bytes",
    "explained",
    "fits",
    "offload_activations",
    "place",
    "plan",
    "plan_store",
    "probe",
]

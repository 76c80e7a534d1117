"""Keeps parameters, gradients and optimizer states that do not fit on the device in host memory or on NVMe."""

from .activations import ActivationError, Activations, offload_activations
from .core import available_host_bytes
from .errors import AsleepError, BudgetError, ClosedError, GenerationError, OffloadError, PlacementError, SwapError
from .layout.footprint import StorePlan
from .layout.store_plan import plan_store
from .layout.tile import place
from .memory.arena import HostBudget
from .memory_store import CompressedByteStore, MemoryByteStore
from .oom_hints import OutOfMemoryError, explained
from .planning.budgets import PlanError
from .planning.hardware import Hardware, HardwareError
from .planning.model_sizes import ModelSizes, ParameterSizes, UnitSizes
from .planning.planner import Plan, fits, plan
from .planning.probing import probe
from .protocols import ByteStore, Field, Ticket, UpdateStep
from .store.read_generation import slab_name, slabs_to_move, write_checkpoint
from .store.tiered_store import TieredStore
from .tier import Tier
from .timeline import Timeline
from .torch_step import TorchStep
from .uncut_step import step_for

__version__ = "0.2.0"

__all__ = [
    "ActivationError",
    "Activations",
    "AsleepError",
    "BudgetError",
    "ByteStore",
    "ClosedError",
    "CompressedByteStore",
    "Field",
    "GenerationError",
    "Hardware",
    "HardwareError",
    "HostBudget",
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
    "slab_name",
    "slabs_to_move",
    "step_for",
    "write_checkpoint",
]

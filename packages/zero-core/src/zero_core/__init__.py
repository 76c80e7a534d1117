"""ZeRO stages 0-3 for any PyTorch module."""

from .gathered import gathered
from .heap import keep_freed_memory
from .shard import Handle, handle, no_sync, shard, units

__all__ = ["Handle", "gathered", "handle", "keep_freed_memory", "no_sync", "shard", "units"]
__version__ = "0.1.0"

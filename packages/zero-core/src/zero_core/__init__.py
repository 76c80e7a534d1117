"""ZeRO stages 0-3 for any PyTorch module."""

from . import checkpoint, memory
from .errors import ZeroError
from .gathered import gathered
from .heap import keep_freed_memory
from .init import deferred_init, materialise
from .pretrained import load_pretrained, save_pretrained
from .scaling import LossScale
from .shard import Handle, handle, no_sync, shard, units
from .store import ShardStore
from .tiling import TiledLinear, tile_linear

__all__ = [
    "Handle",
    "LossScale",
    "ShardStore",
    "TiledLinear",
    "ZeroError",
    "checkpoint",
    "deferred_init",
    "gathered",
    "handle",
    "keep_freed_memory",
    "load_pretrained",
    "materialise",
    "memory",
    "no_sync",
    "save_pretrained",
    "shard",
    "tile_linear",
    "units",
]
__version__ = "0.1.0"

"""Shards any PyTorch module by ZeRO stages 0-3."""

from . import checkpoint, memory
from .averaging import AveragedModel
from .building.deferred import deferred_init
from .building.init import materialise
from .building.tiling import TiledLinear, tile_linear
from .checkpoint.pretrained import load_pretrained, save_pretrained
from .durable import Resumed, commit, resume
from .errors import ZeroError
from .full_values import full_gradient, full_state, set_full_gradient, set_full_state
from .gathering import gathered, trained_state_dict
from .heap import keep_freed_memory
from .optim.joint import JointOptimizer
from .optim.muon import Muon
from .runtime.scaling import LossScale
from .sharding import Handle, handle, no_sync, shard, units, unshard
from .sleeping import sleep, wake
from .store import ShardStore

__all__ = [
    "AveragedModel",
    "Handle",
    "JointOptimizer",
    "LossScale",
    "Muon",
    "Resumed",
    "ShardStore",
    "TiledLinear",
    "ZeroError",
    "checkpoint",
    "commit",
    "deferred_init",
    "full_gradient",
    "full_state",
    "gathered",
    "handle",
    "keep_freed_memory",
    "load_pretrained",
    "materialise",
    "memory",
    "no_sync",
    "resume",
    "save_pretrained",
    "set_full_gradient",
    "set_full_state",
    "shard",
    "sleep",
    "tile_linear",
    "trained_state_dict",
    "units",
    "unshard",
    "wake",
]
__version__ = "0.2.0"

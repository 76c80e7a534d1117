"""Shards any PyTorch module by ZeRO stages 0-3."""

from . import checkpoint, memory
from .api.averaged_model import AveragedModel
from .api.full_values import full_gradient, full_state, gathered, set_full_gradient, set_full_state, trained_state_dict
from .api.resume import Resumed, commit, resume
from .api.shard import Handle, handle, no_sync, shard, units, unshard
from .api.sleep import sleep, wake
from .checkpoint.pretrained import load_pretrained, save_pretrained
from .errors import ZeroError
from .gradients.loss_scaling import LossScale
from .model.deferred_init import deferred_init
from .model.initial_values import materialise
from .model.tiled_linear import TiledLinear, tile_linear
from .optim.joint import JointOptimizer
from .optim.muon import Muon
from .store import ShardStore
from .util.freed_memory import keep_freed_memory

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

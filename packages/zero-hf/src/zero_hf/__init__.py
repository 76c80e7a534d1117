"""transformers' Trainer, TRL's trainers and accelerate over zero-core's stages and zero-offload's tiers."""

from .accelerating import Accelerator
from .config import ConfigError, ZeroConfig
from .deepspeed.translation import from_deepspeed
from .loading import from_pretrained
from .merging import merge_adapter
from .sharding import Run, shard
from .trainer import sharded

__version__ = "0.2.0"

__all__ = [
    "Accelerator",
    "ConfigError",
    "Run",
    "ZeroConfig",
    "from_deepspeed",
    "from_pretrained",
    "merge_adapter",
    "shard",
    "sharded",
]

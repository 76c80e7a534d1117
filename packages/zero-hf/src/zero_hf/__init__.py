"""transformers' Trainer, TRL's trainers and accelerate over zero-core's stages and zero-offload's tiers."""

from .config import ConfigError, ZeroConfig
from .sharding import Run, shard
from .trainer import sharded

__version__ = "0.1.0"

__all__ = ["ConfigError", "Run", "ZeroConfig", "shard", "sharded"]

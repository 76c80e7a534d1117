"""Runs DeepSpeed's JSON files, checkpoints and training loops on zero-core and zero-offload.

`import zero_deepspeed as deepspeed` replaces `import deepspeed` in a script that calls deepspeed.initialize.
DeepSpeed is not needed.
"""

from typing import Any

from torch import distributed as comm

from zero_core.errors import ConfigError

from . import utils, zero
from .checkpoint import load_checkpoint
from .engine import Engine
from .starting import add_config_arguments, init_distributed, initialize
from .translation import Translation, from_deepspeed

__version__ = "0.2.0"

DeepSpeedEngine = Engine

__all__ = [
    "ConfigError",
    "DeepSpeedEngine",
    "Engine",
    "Translation",
    "add_config_arguments",
    "comm",
    "from_deepspeed",
    "init_distributed",
    "initialize",
    "load_checkpoint",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"zero_deepspeed has no {name!r}; it has {', '.join(__all__)}")

"""What DeepSpeed's users have, read here: their JSON, their checkpoints and their loop. DeepSpeed is not needed.

`from zero_hf import deepspeed` stands for `import deepspeed` in a script that calls deepspeed.initialize.
"""

from typing import Any

from torch import distributed as comm

from . import utils, zero
from .engine import Engine
from .starting import add_config_arguments, init_distributed, initialize

DeepSpeedEngine = Engine

__all__ = [
    "DeepSpeedEngine",
    "Engine",
    "add_config_arguments",
    "comm",
    "init_distributed",
    "initialize",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"zero_hf.deepspeed has no {name!r}; it has {', '.join(__all__)}")

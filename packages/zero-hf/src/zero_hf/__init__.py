"""Runs transformers' Trainer, TRL's trainers and accelerate on zero-core's stages and zero-offload's tiers.

A name is imported when it is first used: importing transformers takes seconds, and the command line must answer Ctrl-C
before.
"""

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accelerator import Accelerator as Accelerator
    from .config import ConfigError as ConfigError
    from .config import ZeroConfig as ZeroConfig
    from .deepspeed.translation import from_deepspeed as from_deepspeed
    from .merging import merge_adapter as merge_adapter
    from .pretrained import from_pretrained as from_pretrained
    from .sharding import Run as Run
    from .sharding import shard as shard
    from .trainer.sharded import sharded as sharded

__version__ = "0.2.0"

_HOMES = {
    "Accelerator": "accelerator",
    "ConfigError": "config",
    "Run": "sharding",
    "ZeroConfig": "config",
    "from_deepspeed": "deepspeed.translation",
    "from_pretrained": "pretrained",
    "merge_adapter": "merging",
    "shard": "sharding",
    "sharded": "trainer.sharded",
}
__all__ = list(_HOMES)


def _check_transformers() -> None:
    """Raises ImportError for a version of transformers that pyproject.toml does not allow."""
    found = metadata.version("transformers")
    if not (5, 23) <= tuple(map(int, found.split(".")[:2])) < (6,):
        raise ImportError(
            f"zero-hf {__version__} needs transformers>=5.23,<6, and {found} is installed: "
            "pip install 'transformers>=5.23,<6'"
        )


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        _check_transformers()
        value = globals()[name] = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

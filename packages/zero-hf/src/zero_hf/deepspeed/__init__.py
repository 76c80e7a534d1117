"""Keeps the older name of the package zero-deepspeed, with all of its modules. Translations make a ZeroConfig here."""

import sys
from importlib import import_module
from typing import Any

try:
    import zero_deepspeed
except ModuleNotFoundError as error:
    raise ImportError("this needs the package zero-deepspeed: pip install zero-deepspeed") from error

from zero_deepspeed import *  # noqa: F403
from zero_deepspeed import __all__ as __all__

from .translation import from_deepspeed as from_deepspeed

_MODULES = ("checkpoint", "convert", "engine", "files", "optimizers", "pickles", "schedules", "starting")

for _name in (*_MODULES, "utils", "zero"):
    sys.modules[f"{__name__}.{_name}"] = import_module(f"zero_deepspeed.{_name}")


def __getattr__(name: str) -> Any:
    return getattr(zero_deepspeed, name)

"""Imports the packages that only some runs need, and names the extra of zero-train that installs each of them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from typing import Any

from zero_train.errors import ConfigError

EXTRAS = {
    "zero_nvme": "nvme",
    "zero_optim_cpu": "cpu",
    "transformers": "hf",
    "zero_hf": "hf",
    "datasets": "finetune",
    "psutil": "sweeps",
}


def installed(module: str, user: str, way_out: str = "", *, extra: str | None = None) -> None:
    """Raises ConfigError, naming the extra to install, if a package that `user` needs is not installed."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{user} needs {module.replace('_', '-')}, which is not installed; "
            f"pip install 'zero-train[{extra or EXTRAS[module]}]'{way_out}"
        )


def loaded(module: str) -> Any:
    """Imports an optional package. Raises ConfigError if it does not load, for example if built for another Python."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module.replace('_', '-')} does not load ({error}); reinstall it with "
            f"pip install --force-reinstall 'zero-train[{EXTRAS[module.partition('.')[0]]}]'"
        ) from error


def named(key: str, text: str, what: str) -> Any:
    """Returns the object that MODULE:NAME names, in an installed or local module. what: "function" or "class".

    Raises ConfigError, naming `key`, if the object does not exist or cannot be called.
    """
    sys.path.append(str(Path.cwd()))
    try:
        found = pkgutil.resolve_name(text)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={text} names no {what}: {error}; write MODULE:{what.upper()}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    if not callable(found):
        raise ConfigError(f"{key}={text} is not a {what}; write MODULE:{what.upper()}")
    return found

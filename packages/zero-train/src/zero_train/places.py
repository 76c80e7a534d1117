"""Where a run keeps its values: which tiers it uses, and in which folders.

A folder that cannot be used is refused with the key to change, and no file is left behind.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_train.errors import ConfigError
from zero_train.extras import loaded
from zero_train.schema import Config

STATE_KINDS = ("parameters", "gradients", "optimizer")


def activations(config: Config) -> tuple[str, ...]:
    """Returns the policies in offload.activations without repetition; model.checkpointing decides if there are none."""
    given = config.offload.activations
    if given is None:
        return ("recompute" if config.model.checkpointing else "keep",)
    return (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))


def on(placement: Any, tier: str) -> bool:
    """Returns whether a placement, which is a tier or fractions of tiers, puts anything on `tier`."""
    return placement.get(tier, 0) > 0 if isinstance(placement, Mapping) else placement == tier


def uses_nvme(config: Config) -> bool:
    """Returns whether any tile may be placed on nvme. offload=auto may if nvme_paths are given or it finds a disk."""
    if config.run.durable is not None:
        return True
    if config.offload.kind == "auto":
        return not auto_without_nvme(config)
    states = any(on(getattr(config.offload, kind), "nvme") for kind in STATE_KINDS)
    return config.offload.kind == "placed" and (states or "nvme" in activations(config))


def auto_without_nvme(config: Config) -> str:
    """Returns the reason why offload=auto plans without nvme, or an empty string if it may use nvme."""
    if config.offload.kind != "auto" or config.offload.nvme_paths:
        return ""
    if importlib.util.find_spec("zero_nvme") is None:
        return "zero-nvme is not installed"
    folder = existing(nvme_paths(config, 0)[0])
    memory = memory_filesystem(folder)
    return f"{folder} is in memory ({memory})" if memory else ""


def uses_tiers(config: Config) -> bool:
    """Returns whether a placement names one of offload.tiers. The planner chooses none of them by itself."""
    names = ((kind, tier) for kind in STATE_KINDS for tier in config.offload.tiers)
    return config.offload.kind == "placed" and any(on(getattr(config.offload, kind), tier) for kind, tier in names)


def nvme_paths(config: Config, local_rank: int) -> list[Path]:
    """Returns the folders of this rank's slab, with `{local_rank}` filled in. The default is the run folder."""
    given = config.offload.nvme_paths
    texts = [given] if isinstance(given, str) else [str(path) for path in given or [config.run.dir]]
    return [Path(text.replace("{local_rank}", str(local_rank))) for text in texts]


def nvme(config: Config, local_rank: int) -> None:
    """Raises ConfigError if a folder of the slab does not exist, is not writable, or is in memory."""
    if not uses_nvme(config):
        return
    key = "offload.nvme_paths" if config.offload.nvme_paths else "run.dir (offload.nvme_paths is empty)"
    way_out = "name a writable folder on a disk with offload.nvme_paths=[…], or choose offload=host"
    for path in nvme_paths(config, local_rank):
        folder = path if config.offload.nvme_paths else existing(path)  # the run folder need not exist yet
        _writable(key, folder, way_out)
        memory = memory_filesystem(folder)
        if memory and not config.io.allow_memory:
            raise ConfigError(f"{key}: {path} is in memory ({memory}), so nothing would be saved; {way_out}")


def run_folder(config: Config) -> None:
    """Raises ConfigError naming run.dir if the run folder cannot be made."""
    path = Path(config.run.dir)
    _writable(f"run.dir={path}", existing(path), "name another folder with run.dir=…")


def free_bytes(folder: Path) -> int:
    """Returns the bytes that this user may still write to the filesystem that holds, or would hold, `folder`."""
    found = os.statvfs(existing(folder))
    return found.f_bavail * found.f_frsize


def memory_filesystem(folder: Path) -> str | None:
    """Returns the name of the filesystem of `folder` if it lives in memory, else None. Needs zero_nvme."""
    filesystem = loaded("zero_nvme").filesystem
    name: str = filesystem.filesystem_name(os.fspath(folder))
    return name if name in filesystem.IN_MEMORY else None


def existing(path: Path) -> Path:
    """Returns `path` if it exists, else the nearest of its parents that does."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _writable(key: str, folder: Path, way_out: str) -> None:
    """Makes a file in `folder` and deletes it. Raises ConfigError, blaming `key`, if that does not work."""
    if not folder.is_dir():
        raise ConfigError(f"{key}: {folder} {'is not a folder' if folder.exists() else 'does not exist'}; {way_out}")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except OSError as error:
        raise ConfigError(f"{key}: cannot write in {folder}: {error.strerror}; {way_out}") from error

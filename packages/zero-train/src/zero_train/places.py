"""Where a run keeps its values: which tiers it uses, and in which folders."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

"""Says where a run keeps its values: which tiers it uses, and in which folders."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_train.schema import Config

STATE_KINDS = ("parameters", "gradients", "optimizer")


def activations(config: Config) -> tuple[str, ...]:
    """Returns the policies in offload.activations without repetition."""
    given = config.offload.activations or "keep"
    return (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))


def on(placement: Any, tier: str) -> bool:
    """Returns whether a placement, which is a tier or fractions of tiers, puts anything on `tier`."""
    return placement.get(tier, 0) > 0 if isinstance(placement, Mapping) else placement == tier


def uses_nvme(config: Config) -> bool:
    """Returns whether any tile may be placed on nvme."""
    if config.run.durable is not None or config.offload.kind == "auto":
        return True
    states = any(on(getattr(config.offload, kind), "nvme") for kind in STATE_KINDS)
    return config.offload.kind == "placed" and (states or "nvme" in activations(config))


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
    """Returns the bytes that this user may still write to the filesystem that holds, or would hold, `folder`.

    As zero-nvme counts them for a slab, where it is installed.
    """
    try:
        from zero_nvme.files.filesystem import free_bytes as counted
    except ImportError:
        return shutil.disk_usage(existing(folder)).free
    return counted(str(existing(folder)))


def existing(path: Path) -> Path:
    """Returns `path` if it exists, else the nearest of its parents that does."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())

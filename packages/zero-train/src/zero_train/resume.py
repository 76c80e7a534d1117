"""Checkpoints of a run: where they lie, which are kept, and which one to continue from.

Owns the folder's layout and the policy. What is in a checkpoint, and that it is complete or absent, is
zero_core.checkpoint's. Sample numbers follow from the step, so there is no state of the data.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from zero_core import ZeroError
from zero_train.engine import Engine
from zero_train.errors import ConfigError
from zero_train.ranks import Ranks
from zero_train.schema import Config

MANIFEST = ".metadata"  # of torch.distributed.checkpoint: renamed into place when everything else is on disk
_NAME = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One that is complete."""

    folder: Path
    step: int  # the last that it holds


def found(config: Config) -> Checkpoint | None:
    """The checkpoint that run.resume names; None to begin at step 1.

    Raises:
        ConfigError: a folder without one, one past run.steps, or one of another model.
    """
    wanted = config.run.resume
    if wanted is None:
        return None
    if wanted == "auto":
        newest = _newest(Path(config.run.dir))
        if newest is None:
            return None
    else:
        folder = Path(wanted)
        newest = _newest(folder) or _one(folder)
        if newest is None:
            raise ConfigError(
                f"run.resume={wanted} holds no complete checkpoint; name a run folder whose run had "
                "run.checkpoint_every above 0, or begin anew without run.resume"
            )
    if newest.step >= config.run.steps:
        raise ConfigError(
            f"run.resume: {newest.folder} is after step {newest.step} of run.steps={config.run.steps}; raise run.steps"
        )
    _same_model(newest, config)
    return newest


def save(folder: Path, step: int, engine: Engine, config: Config, ranks: Ranks) -> None:
    """Saves the state after `step` under the run folder, then deletes what run.keep_checkpoints does not keep."""
    from zero_core import checkpoint  # needs torch.distributed, which a run without checkpoints can do without

    checkpoint.save(_named(folder, step), engine.model, engine.optimizer, extra={"step": step})
    if ranks.leader:
        for old in _all(folder)[: -config.run.keep_checkpoints]:
            shutil.rmtree(old.folder, ignore_errors=True)


def load(found: Checkpoint, engine: Engine) -> None:
    """Puts the engine where it was after the checkpoint's step.

    Raises:
        ConfigError: a checkpoint that is damaged or of another model.
    """
    from zero_core import checkpoint

    try:
        checkpoint.load(found.folder, engine.model, engine.optimizer)
    except (ZeroError, OSError) as error:
        raise ConfigError(f"run.resume: cannot load {found.folder}: {error}") from error


def _named(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step_{step:07d}"


def _all(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints of a run folder, oldest first."""
    inside = folder / "checkpoints"
    candidates = sorted(inside.iterdir()) if inside.is_dir() else []
    return [one for one in (_one(path) for path in candidates) if one is not None]


def _newest(folder: Path) -> Checkpoint | None:
    return max(_all(folder), key=lambda one: one.step, default=None)


def _one(folder: Path) -> Checkpoint | None:
    """`folder` as a checkpoint, where it is a complete one."""
    named = _NAME.fullmatch(folder.name)
    if named is None or not (folder / MANIFEST).is_file():
        return None
    return Checkpoint(folder, int(named.group(1)))


def _same_model(found: Checkpoint, config: Config) -> None:
    """Compares the run's config.yaml, where the checkpoint still lies in its run folder, with this run's."""
    path = found.folder.parent.parent / "config.yaml"
    if not path.is_file():
        return
    before: Any = OmegaConf.load(path)
    for key, value in OmegaConf.structured(config.model).items():
        if key in before.model and before.model[key] != value and key != "checkpointing":
            raise ConfigError(
                f"run.resume: {found.folder} was saved with model.{key}={before.model[key]}, this run has "
                f"model.{key}={value}; set model.{key}={before.model[key]}"
            )

"""Checkpoints of a run: where they lie, which are kept, which one to continue from, and what is another run's.

Owns the folder's layout and the policy. What is in a checkpoint, and that it is complete or absent, is
zero_core.checkpoint's. Sample numbers follow from the step, so there is no state of the data.

[Note: who may continue what]
    run.resume null     a folder without results. Nothing of another run is continued, mixed with or deleted.
    run.resume=auto     run.dir, where it holds nothing or a run with the same values of SAME: a restarted command.
                        A run without a checkpoint is begun anew.
    run.resume=FOLDER   on purpose: only the model must be the same, and what differs is said.
A command cannot continue one run in a folder that holds another.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from zero_core import ZeroError
from zero_train import config as configuration
from zero_train.engine import Engine
from zero_train.errors import ConfigError
from zero_train.folder import results
from zero_train.ranks import Ranks
from zero_train.schema import Config

CONFIG = "config.yaml"
MANIFEST = ".metadata"  # of torch.distributed.checkpoint: renamed into place when everything else is on disk
_ABSENT = object()
_NAME = re.compile(r"step_(\d+)")


# What makes it the same run. Everything else changes how it computes, how long, or what it reports.
SAME = ("model", "data", "run.seed", "optim", "precision")
_ASIDE = ("model.checkpointing", "optim.threads")
_OF_NO_INTEREST = ("run.dir", "run.resume", "run.dry", "run.bar", "run.plots", "run.report_every", "run.export")


@dataclass(frozen=True)
class Checkpoint:
    """One that is complete."""

    folder: Path
    step: int  # the last that it holds


def found(config: Config) -> Checkpoint | None:
    """The checkpoint that run.resume names; None to begin at step 1.

    Raises:
        ConfigError: a folder without one, one past run.steps, one of another model, a run.dir that holds another run.
    """
    own, wanted = Path(config.run.dir), config.run.resume
    if wanted is None:
        if not config.run.dry:
            _free(own)
        return None
    if wanted == "auto":
        newest = _newest(own)
        _the_same(own, newest, config)
        if newest is None:
            return None
    else:
        folder = Path(wanted)
        newest = _newest(folder) or _one(folder.absolute())
        if newest is None:
            raise ConfigError(
                f"run.resume={wanted} holds no complete checkpoint; name a run folder whose run had "
                "run.checkpoint_every above 0, or begin anew without run.resume"
            )
        if not config.run.dry:
            _continues(newest, own)
    if newest.step > config.run.steps:
        raise ConfigError(
            f"run.resume: {newest.folder} is after step {newest.step} of run.steps={config.run.steps}; raise run.steps"
        )
    for key, (before, now) in _differences(_saved(newest), config).items():
        if key.startswith("model.") and key not in _ASIDE:
            raise ConfigError(
                f"run.resume: {newest.folder} was saved with {key}={before}, this run has {key}={now}; set "
                f"{key}={before}"
            )
    return newest


def differing(checkpoint: Checkpoint, config: Config) -> str:
    """A sentence on what differs between this run and the one that saved `checkpoint`; empty where nothing does."""
    if (before := _saved(checkpoint)) is None:
        return "there is no config.yaml beside it: whether data, seed and optimizer are the same is not known"
    listed = [f"{key}={now} (was {then})" for key, (then, now) in _differences(before, config).items()]
    return f"differs from the run that is continued: {', '.join(listed)}" if listed else ""


def _free(folder: Path) -> None:
    """Refuses to begin a run in a folder that holds one."""
    if there := results(folder):
        newest = _newest(folder)
        way = f", or continue it after step {newest.step} with run.resume=auto" if newest else ""
        raise ConfigError(
            f"run.dir={folder} holds a run already ({', '.join(there)}); name another folder with run.dir=…{way}"
        )


def _the_same(folder: Path, newest: Checkpoint | None, config: Config) -> None:
    """Refuses to continue, or to begin anew, as if it were this one, a run that is another."""
    if not (there := results(folder)):
        return
    before = _saved(newest) if newest else _read(folder / CONFIG)
    refused, on_purpose = "", f", or continue it on purpose with run.resume={folder}" if newest else ""
    if before is None:
        refused = f"a run ({', '.join(there)}) without a config.yaml that says which"
    elif differ := [
        f"{key}={then}, now {now}" for key, (then, now) in _differences(before, config).items() if _identifies(key)
    ]:
        refused = f"another run ({', '.join(differ)})"
    elif not newest and (origin := OmegaConf.select(before, "run.resume")) not in (None, "auto"):
        refused, on_purpose = f"a run that continued {origin} and has no checkpoint", f" and run.resume={origin}"
    if refused:
        raise ConfigError(
            f"run.resume=auto: run.dir={folder} holds {refused}; name another folder with run.dir=…{on_purpose}"
        )


def _identifies(key: str) -> bool:
    return key not in _ASIDE and (key in SAME or key.split(".")[0] in SAME)


def _continues(checkpoint: Checkpoint, own: Path) -> None:
    """Refuses to continue `checkpoint` in a folder where other checkpoints or metrics would mix with what follows."""
    newest = _newest(own)
    if newest is not None and newest.folder.resolve() != checkpoint.folder.resolve():
        raise ConfigError(
            f"run.dir={own} holds a run that has come to step {newest.step}, and run.resume={checkpoint.folder} is "
            "another one or an earlier step; continue into a new folder with run.dir=…"
        )
    if newest is None:
        _free(own)


def _saved(checkpoint: Checkpoint) -> DictConfig | None:
    """The configuration that a checkpoint was saved under; of a run folder's own where it has none in it."""
    own = _read(checkpoint.folder / CONFIG)
    return _read(checkpoint.folder.parent.parent / CONFIG) if own is None else own


def _read(path: Path) -> DictConfig | None:
    """A config.yaml; None where there is none. Raises ConfigError if it cannot be read."""
    if not path.is_file():
        return None
    try:
        read = OmegaConf.load(path)
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}; name another folder") from error
    return read if isinstance(read, DictConfig) else OmegaConf.create()


def _differences(before: DictConfig | None, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys whose value is another now: (before, now). A key that one of the two does not have is none."""
    changes: dict[str, tuple[Any, Any]] = {}
    if before is None:
        return changes
    for section, values in OmegaConf.structured(config).items():
        for key in values:
            name = f"{section}.{key}"
            then = OmegaConf.select(before, name, default=_ABSENT)
            if then is not _ABSENT and then != values[key] and name not in _OF_NO_INTEREST:
                changes[name] = (then, values[key])
    return changes


def save(folder: Path, step: int, engine: Engine, config: Config, ranks: Ranks, text: str) -> None:
    """Saves the state after `step` under the run folder, then deletes what run.keep_checkpoints does not keep.

    `text`: the corpus's digest, by which a run that is continued knows its text again.
    """
    from zero_core import checkpoint  # needs torch.distributed, which a run without checkpoints can do without

    target, extra = _named(folder, step), {"step": step, "text": text}
    if ranks.leader:  # before the manifest, with which the checkpoint is complete
        target.mkdir(parents=True, exist_ok=True)
        configuration.save(config, target / CONFIG)
    checkpoint.save(target, engine.model, engine.optimizer, extra=extra)
    if ranks.leader:
        for old in _all(folder)[: -config.run.keep_checkpoints]:
            shutil.rmtree(old.folder, ignore_errors=True)


def load(found: Checkpoint, engine: Engine, config: Config, ranks: Ranks, text: str) -> list[str]:
    """Puts the engine where it was after the checkpoint's step. Returns sentences on what is not as it was.

    Raises:
        ConfigError: a checkpoint that is damaged, of another model, or under run.resume=auto of another text.
    """
    from zero_core import checkpoint

    try:
        loaded = checkpoint.load(found.folder, engine.model, engine.optimizer)
    except (ZeroError, OSError) as error:
        raise ConfigError(f"run.resume: cannot load {found.folder}: {error}") from error
    said = []
    before = loaded.extra.get("text", text) if isinstance(loaded.extra, dict) else text
    if before != text:
        said.append(f"the text is another than the saved run's: {text}, which was {before}")
        if config.run.resume == "auto":
            raise ConfigError(
                f"run.resume=auto: {said[0]}; bring that text back, or continue with this one on purpose with "
                f"run.resume={config.run.dir}"
            )
    if loaded.world_size not in (None, ranks.world_size):
        said.append(f"the saved run had {loaded.world_size} ranks, this one has {ranks.world_size}: so has its batch")
    return said


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

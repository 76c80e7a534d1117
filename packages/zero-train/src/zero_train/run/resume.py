"""Saves and loads the checkpoints of a run, and decides which run may continue from which.

Owns the layout of the folder and that policy. zero_core.checkpoint owns the content of a checkpoint, and leaves it
either complete or absent. Sample numbers follow from the step and run.global_batch, so the data have no state to save.

[Note: who may continue what]
    run.resume null     needs a folder without results. It never continues, mixes with or deletes another run.
    run.resume=auto     continues run.dir if it is empty or its run has the same values of SAME, as a restarted command
                        does. A run without a checkpoint starts again.
    run.resume=FOLDER   continues any run with the same model, and prints what else differs.
No command continues one run in a folder that holds another.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from zero_core import ZeroError
from zero_train.errors import ConfigError, told
from zero_train.report.metrics import replace
from zero_train.run.assemble import Assembled
from zero_train.run.ranks import Ranks
from zero_train.run.run_folder import results
from zero_train.schema import Config
from zero_train.settings import compose as configuration

CONFIG = "config.yaml"
MANIFEST = ".metadata"  # of torch.distributed.checkpoint: renamed into place when everything else is on disk
TRAINER_STATE = "trainer_state.json"  # the file that transformers' Trainer writes last into its checkpoint-N
_NAME = re.compile(r"(?:step_|checkpoint-)(\d+)")


# The keys that identify a run. All others change how it computes, how long it runs, or its reports.
SAME = ("task", "trl", "adapter", "model", "data", "run.seed", "optim", "precision")
_ASIDE = ("optim.threads", "optim.warmup_steps")  # the last follows run.steps
_BOUND = ("model", "task.kind", "optim.kind", "optim.target", *(f"adapter.{k}" for k in ("kind", "rank", "targets")))
_OF_NO_INTEREST = (
    *("run.dir", "run.resume", "run.dry", "run.bar", "run.plots", "run.report_every", "run.export", "run.timeout"),
    "optim.base_lr",  # optim.lr follows from it
)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    step: int  # the last that it holds


def found(config: Config) -> Checkpoint | None:
    """Returns the checkpoint that run.resume names, or None to begin at step 1.

    Raises:
        ConfigError: the folder has none, it is of another model, or run.dir holds another run.
    """
    own, wanted = Path(config.run.dir), config.run.resume
    if wanted is None:
        if not config.run.dry:
            _free(own, _way(own, config))
        return None
    if wanted == "auto":
        newest = _newest(own)
        _the_same(own, newest, config)
        if newest is None:
            return None
    else:
        folder = Path(wanted)
        newest = _newest(folder) or complete(folder.absolute())
        if newest is None:
            raise ConfigError(
                f"run.resume={wanted} holds no complete checkpoint; name a run folder whose run had "
                "run.checkpoint_every above 0, or start again without run.resume"
            )
        last = _newest(own)
        if not config.run.dry and (last is None or last.folder.resolve() != newest.folder.resolve()):
            _free(own, f", because run.resume={newest.folder} is not the last checkpoint of {own}")
    if differ := {key: pair for key, pair in identity(saved(newest), config).items() if _among(key, ("model",))}:
        raise ConfigError(
            f"run.resume: {newest.folder} was saved with {listed(differ)}; set {back(differ)}, or leave run.resume "
            "out and name a new folder with run.dir=…"
        )
    return newest


def not_past(found: Checkpoint | None, config: Config) -> None:
    """Raises ConfigError if the checkpoint is past the end of the run."""
    run = config.run
    if found is not None and found.step > run.steps:
        given = f"run.steps={run.steps}" if run.epochs is None else f"step {run.steps} (run.epochs={run.epochs:g})"
        raise ConfigError(
            f"run.resume: {found.folder} was saved after step {found.step}, and this run ends at {given}; raise "
            f"{'run.steps' if run.epochs is None else 'run.epochs'}"
        )


def differing(before: DictConfig | None, config: Config) -> str:
    """Returns a sentence on how this run differs from the one before, or "" if it does not."""
    if before is None:
        return "it has no config.yaml, so whether data, seed and optimizer are the same is not known"
    changes = _differences(before, config)
    if OmegaConf.select(before, "run.global_batch") == config.run.global_batch:
        changes.pop("run.accumulate", None)  # it follows from the number of ranks, and `keep_batch` says so
    listed = [f"{key}={now} (was {then})" for key, (then, now) in changes.items()]
    return f"differs from the run that it continues: {', '.join(listed)}" if listed else ""


def keep_batch(found: Checkpoint | None, config: Config, ranks: int) -> str:
    """Sets run.global_batch, and the run.accumulate that follows from it. Returns what to say, or "".

    A run that run.resume=auto continues has the batch that it had, so that sample numbers follow from its steps.

    Raises:
        ConfigError: that many sequences are no whole number of micro-batches on each of `ranks` ranks.
    """
    run, wanted = config.run, config.run.global_batch or _continued(found, config, "run.global_batch")
    at_once, given = run.micro_batch * ranks, run.accumulate
    if wanted is None:
        wanted = at_once * given
    if wanted % at_once:
        whose = "" if run.global_batch else ", from the run that run.resume=auto continues,"
        each, way = wanted // ranks, f"start a number of ranks that divides {wanted // gcd(wanted, run.micro_batch)}"
        if wanted % ranks == 0:
            fits = max(size for size in range(1, min(run.micro_batch, each) + 1) if each % size == 0)
            way = f"set run.micro_batch={fits}"
        raise ConfigError(
            f"run.global_batch={wanted}{whose} is no multiple of {at_once}, which is run.micro_batch={run.micro_batch} "
            f"times the number of ranks, {ranks}; {way}, or set run.global_batch="
            f"{max(1, round(wanted / at_once)) * at_once}"
        )
    run.global_batch, run.accumulate = wanted, wanted // at_once
    if run.accumulate == given:
        return ""
    return f"run.accumulate={run.accumulate} in place of {given}: a step has run.global_batch={wanted} on {ranks} ranks"


def keep_plan(found: Checkpoint | None, config: Config, ranks: int) -> None:
    """Sets what decides which tiles a GPU updates to the values of the run that run.resume=auto continues.

    These are offload.update_share, and on as many ranks offload.planned, which offload=auto wrote.
    """
    if config.offload.update_share is None:
        config.offload.update_share = _continued(found, config, "offload.update_share")
    planned = _continued(found, config, "offload.planned")
    if config.offload.kind == "auto" and planned is not None and len(planned) == ranks:
        config.offload.planned = OmegaConf.to_container(planned)


def _continued(found: Checkpoint | None, config: Config, key: str) -> Any:
    """Returns the key's value in the run that run.resume=auto continues; None: there is none."""
    if config.run.resume != "auto":
        return None
    before = saved(found) if found else _read(Path(config.run.dir) / CONFIG)
    return None if before is None else OmegaConf.select(before, key)


def _free(folder: Path, way: str = "") -> None:
    """Raises ConfigError if the folder holds a run. `way` is another way out than a new folder."""
    if there := results(folder):
        raise ConfigError(f"run.dir={folder} holds a run ({', '.join(there)}); name another folder with run.dir=…{way}")


def _the_same(folder: Path, newest: Checkpoint | None, config: Config) -> None:
    """Raises ConfigError if the folder holds a run that is not the same as this one."""
    if not (there := results(folder)):
        return
    before = saved(newest) if newest else _read(folder / CONFIG)
    refused, way = "", _way(folder, config)
    if before is None:
        refused = f"a run ({', '.join(there)}) without a config.yaml that says which"
    elif differ := identity(before, config):
        refused = f"another run ({listed(differ)})"
    elif not newest and (origin := OmegaConf.select(before, "run.resume")) not in (None, "auto"):
        refused, way = f"a run that continued {origin} and has no checkpoint", f" and run.resume={origin}"
    if refused:
        raise ConfigError(f"run.resume=auto: run.dir={folder} holds {refused}; name another folder with run.dir=…{way}")


def _way(folder: Path, config: Config) -> str:
    """Returns how this command could continue the run in the folder, or "" if that has no checkpoint."""
    if (newest := _newest(folder)) is None:
        return ""
    before = saved(newest)
    differ = identity(before, config)
    if before is None or (differ and not any(_among(key, _BOUND) for key in differ)):
        how = f"with the new settings by run.resume={folder}"
    else:
        how = f"with {'its own settings by ' if differ else ''}run.resume=auto {back(differ)}".rstrip()
    more = f" run.steps={newest.step}" if newest.step > config.run.steps else ""
    return f". Or continue that run after step {newest.step} {how}{more}"


def saved(checkpoint: Checkpoint) -> DictConfig | None:
    """Returns the configuration in the checkpoint; if it has none, the one in its run folder."""
    own = _read(checkpoint.folder / CONFIG)
    return _read(checkpoint.folder.parent.parent / CONFIG) if own is None else own


def _read(path: Path) -> DictConfig | None:
    """Returns a config.yaml, or None if there is none. Raises ConfigError if it cannot be read."""
    if not path.is_file():
        return None
    with told(
        f"{path} cannot be read: ", OSError, ValueError, YAMLError, way_out="; repair this file, or give another folder"
    ):
        read = OmegaConf.load(path)
    return read if isinstance(read, DictConfig) else OmegaConf.create()


def _differences(before: DictConfig | None, config: Config) -> dict[str, tuple[Any, Any]]:
    """Returns (before, now) of every key whose value changed, among the keys that both configurations have."""
    then, now = ({} if it is None else _values(it) for it in (before, OmegaConf.structured(config)))
    both = [key for key in now if key in then and key not in _OF_NO_INTEREST]
    gone = {key: (then[key], None) for key in ("optim.schedule",) if then.get(key) is not None}  # of version 0.2
    return {key: (then[key], now[key]) for key in both if then[key] != now[key]} | gone


def _values(config: DictConfig) -> dict[str, Any]:
    """Returns the values of a configuration by key. The section trl, which may have any of TRL's fields, is one."""
    found = cast(dict[str, Any], OmegaConf.to_container(config))
    sections = {name: keys for name, keys in found.items() if isinstance(keys, dict) and name != "trl"}
    values = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    return values | {"trl": found.get("trl") or {}}


def identity(before: DictConfig | None, config: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the differences that make it another run."""
    changes = _differences(before, config)
    return {key: pair for key, pair in changes.items() if key not in _ASIDE and _among(key, SAME)}


def _among(key: str, names: tuple[str, ...]) -> bool:
    return not {key, key.split(".")[0]}.isdisjoint(names)


def listed(changes: dict[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key}={then}, now {now}" for key, (then, now) in changes.items())


def back(changes: dict[str, tuple[Any, Any]]) -> str:
    """Returns the words of a command line that give each key the value it had."""
    values = {key.removesuffix(".kind"): "null" if then is None else then for key, (then, _) in changes.items()}
    return " ".join(f"{key}={then}" for key, then in values.items())


def save(folder: Path, step: int, engine: Assembled, config: Config, ranks: Ranks, text: str) -> Any:
    """Saves the state after `step` in the run folder, then deletes the checkpoints beyond run.keep_checkpoints.

    With run.durable, writes it in the background and returns a zero_core.checkpoint.Saving: wait for the last one, and
    call `delete_old` again. `text` is the corpus's digest, by which a resumed run recognises its text. Collective.
    """
    from zero_core import checkpoint  # needs torch.distributed, which a run without checkpoints can do without

    target, extra = folder / "checkpoints" / f"step_{step:07d}", {"step": step, "text": text}
    if ranks.leader:  # before the manifest, with which the checkpoint is complete
        target.mkdir(parents=True, exist_ok=True)
        replace(target / CONFIG, configuration.as_yaml(config))
    saving = checkpoint.save(target, engine.model, engine.optimizer, extra=extra, blocking=config.run.durable is None)
    delete_old(folder, config, ranks)
    return saving


def delete_old(folder: Path, config: Config, ranks: Ranks) -> None:
    """Deletes the checkpoints beyond run.keep_checkpoints. One that is still being written does not count."""
    if ranks.leader:
        for old in checkpoints(folder)[: -config.run.keep_checkpoints]:
            shutil.rmtree(old.folder, ignore_errors=True)


def load(found: Checkpoint, engine: Assembled, config: Config, ranks: Ranks, text: str) -> list[str]:
    """Restores the state after the checkpoint's step. Returns sentences on what differs from the saved run. Collective.

    Raises:
        ConfigError: the checkpoint is damaged or of another model, or run.resume=auto and the text is another.
    """
    from zero_core import checkpoint

    with told(f"run.resume: cannot load {found.folder}: ", ZeroError, OSError), own_options(engine.optimizer, config):
        loaded = checkpoint.load(found.folder, engine.model, engine.optimizer)
    said = []
    before = loaded.extra.get("text", text) if isinstance(loaded.extra, dict) else text
    if before != text:
        said.append(f"the text differs from the saved run's: training and validation are {text}, and were {before}")
        if config.run.resume == "auto":
            raise ConfigError(
                f"run.resume=auto: {said[0]}; restore the saved run's text, or continue with this one on purpose with "
                f"run.resume={config.run.dir}"
            )
    unknown = OmegaConf.select(saved(found) or OmegaConf.create(), "run.global_batch") is None
    if unknown and loaded.world_size not in (None, ranks.world_size):  # an older version saved it
        said.append(f"the saved run had {loaded.world_size} ranks, this one has {ranks.world_size}: so has its batch")
    return said


@contextmanager
def own_options(optimizer: Any, config: Config) -> Iterator[None]:
    """Inside, a checkpoint is loaded. Options of the optimizer that `config` sets stay; from the checkpoint come those
    in which a class of optim.target keeps values of its own."""
    given, whole = {"lr", "initial_lr", "weight_decay", *config.optim.options}, config.optim.kind != "own"
    groups = optimizer.param_groups
    own = [{k: v for k, v in group.items() if k in given or (whole and k != "params")} for group in groups]
    yield
    for group, mine in zip(groups, own, strict=True):
        group.update(mine)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Returns the complete checkpoints of a run folder, oldest first."""
    found = [one for path in folder.glob("checkpoints/*") if (one := complete(path))]
    return sorted(found, key=lambda one: one.step)


def complete(folder: Path) -> Checkpoint | None:
    """Returns `folder` as a checkpoint if it is a complete one."""
    named = _NAME.fullmatch(folder.name)
    written_last = TRAINER_STATE if folder.name.startswith("checkpoint") else MANIFEST
    return Checkpoint(folder, int(named[1])) if named and (folder / written_last).is_file() else None


def _newest(folder: Path) -> Checkpoint | None:
    return next(reversed(checkpoints(folder)), None)

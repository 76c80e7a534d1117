"""Runs that go on from their last step (run.durable): what a generation says of its run, and whether it is this one.

Owns that policy. zero_core.resume owns what goes on, resume.py what makes two runs the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

import zero_core
from zero_train import resume
from zero_train.engine import Assembled
from zero_train.errors import ConfigError
from zero_train.ranks import Ranks
from zero_train.schema import Config


@dataclass
class Position:
    """Where a run is. `step`: the one that is being taken, from 1."""

    step: int = 0


def go_on(ready: Assembled, config: Config, ranks: Ranks, text: str, position: Position) -> int:
    """Begins to keep each step, and goes on with those that an earlier process left. Returns the last of them, or 0.

    `text` is the corpus's digest. Collective.

    Raises:
        ConfigError: the steps are of another run or text, or this run is not to be continued.
    """
    kept = {"text": text, "config": OmegaConf.to_yaml(OmegaConf.structured(config))}
    try:
        found = zero_core.resume(ready.model, ready.optimizer, extra=lambda: {"step": position.step, **kept}).extra
    except zero_core.ZeroError as error:
        raise ConfigError(f"run.durable: {error}") from error
    if found is None:
        return 0
    assert ready.slab is not None
    slabs = f"{Path(config.run.dir).name}: {ready.slab.name}.slab in {', '.join(ready.slab.paths)}"
    if config.run.resume != "auto":
        raise ConfigError(
            f"run.dir={config.run.dir} has durable steps up to {found['step'] - 1} ({slabs}); continue them with "
            "run.resume=auto, name another folder with run.dir=…, or remove these files to begin anew"
        )
    before = OmegaConf.create(found["config"])
    assert isinstance(before, DictConfig)
    if differ := resume.identity(before, config):
        raise ConfigError(
            f"run.resume=auto: the durable steps of run.dir={config.run.dir} are another run's "
            f"({resume.listed(differ)}); set {resume.back(differ)}, or name another folder with run.dir=…"
        )
    if found["text"] != text:
        raise ConfigError(
            f"run.resume=auto: the text differs from that of the durable steps: it is {text}, and was "
            f"{found['text']}; bring that text back, or name another folder with run.dir=…"
        )
    return int(found["step"]) - 1

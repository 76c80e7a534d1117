"""Checks what can be checked before torch is imported, which takes seconds: values, packages, the rows.

A mistake that is found here is told before anything else happens. Rows are converted here, and found converted later.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from zero_train import checks, extras, model_folders, row_sets
from zero_train.errors import ConfigError
from zero_train.schema import Config

__all__ = ["check", "held_out", "tuning"]


def check(config: Config) -> None:
    """Raises ConfigError for the first mistake."""
    checks.values(config)
    if config.task.kind != "pretrain" and not config.run.probe:
        _rows(config)


def _rows(config: Config) -> None:
    tuning(config)
    path = Path(str(config.model.path))
    if path.is_dir() and not (path / "config.json").is_file():
        raise model_folders.no_model(path)
    if config.task.kind != "reward" and path.is_dir() and model_folders.scores(path):
        raise ConfigError(
            f"model.path={path} is a reward model, which scores texts and has no head that writes them; name the model "
            "that it was trained from, or set task=reward"
        )
    if row_sets.named(config.data):
        held_out(config, row_sets.load(config).validation is not None)


def held_out(config: Config, some: bool) -> None:
    """Raises ConfigError if the run goes by validation losses, and no row is held out."""
    run = config.run
    if not some and (run.keep_best or run.patience):
        raise ConfigError(
            f"{'run.keep_best=true' if run.keep_best else f'run.patience={run.patience}'} goes by the loss on rows "
            "that are held out, and none are; set data.validation_fraction=0.05 or data.validation_path"
        )


def tuning(config: Config) -> None:
    """Raises ConfigError if a package is missing, or a key excludes fine-tuning."""
    if config.model.kind != "hf":
        raise ConfigError(
            f"task={config.task.kind} needs a pretrained model, but model={config.model.kind}; name one with "
            "model.path=FOLDER"
        )
    if config.adapter.dora and config.adapter.kind == "qlora":
        raise ConfigError(
            "adapter.dora=true measures the weights, and adapter=qlora holds them in 4 bits, which is not supported; "
            "choose adapter=lora, or set adapter.dora=false"
        )
    if config.adapter.dora and config.adapter.merge:
        raise ConfigError(
            "adapter.merge=true adds A and B to the weights, and adapter.dora=true also scales them; set "
            "adapter.merge=false, and merge with PEFT's merge_and_unload()"
        )
    if config.task.kind == "reward" and config.adapter.merge:
        raise ConfigError(
            "adapter.merge=true adds adapters to the weights of model.path, without the head that task=reward trains; "
            "set adapter.merge=false, and merge with PEFT's merge_and_unload()"
        )
    planned = config.run.dry and not row_sets.named(config.data)
    needed = ["zero_hf", *([] if config.adapter.kind == "none" else ["peft"]), *([] if planned else ["trl"])]
    if config.adapter.kind == "qlora" and not config.run.dry:
        needed.append("bitsandbytes")
    if (tracker := config.tracker.kind) != "none" and not config.run.dry and not importlib.util.find_spec(tracker):
        raise ConfigError(f"tracker={tracker} needs {tracker}, which is not installed; pip install {tracker}")
    for module in needed:
        extras.installed(module, f"task={config.task.kind}", extra="finetune")
    if config.zero.update_in_backward:
        raise ConfigError(f"task={config.task.kind} steps after backward; set zero.update_in_backward=false")
    if config.adapter.merge and not config.run.export:
        raise ConfigError("adapter.merge=true merges what run.export=true writes; set run.export=true")
    if config.precision.parameters == "fp16":
        raise ConfigError(f"task={config.task.kind} has no loss scaling; set precision=bf16 or precision=fp32")

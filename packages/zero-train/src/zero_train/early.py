"""Checks what can be checked before torch is imported, which takes seconds: values, packages, the rows.

A mistake found here is reported before anything else happens. Rows are converted here, and later found in the cache.
"""

from __future__ import annotations

from pathlib import Path

from zero_train import checks, model_folders, row_sets
from zero_train.errors import ConfigError
from zero_train.schema import Config

__all__ = ["check", "rows"]


def check(config: Config) -> None:
    """Raises ConfigError for the first mistake."""
    checks.values(config)
    if config.task.kind == "pretrain" or config.run.probe:
        return
    path = Path(str(config.model.path))
    if path.is_dir() and not (path / "config.json").is_file():
        raise model_folders.no_model(path)
    if config.task.kind != "reward" and path.is_dir() and model_folders.scores(path):
        raise ConfigError(
            f"model.path={path} is a reward model, which scores texts and has no head that writes them; name the model "
            "that it was trained from, or set task=reward"
        )
    rows(config)


def rows(config: Config) -> row_sets.Rows | None:
    """Returns the rows to learn from; None for a plan without any.

    Raises:
        ConfigError: a package is missing, a row has a mistake, or the run needs validation losses and no row is held
            out.
    """
    run = config.run
    planned = run.dry and not row_sets.named(config.data)
    checks.tuning_packages(config, planned)
    if planned:
        return None
    read = row_sets.load(config)
    if read.validation is None and (run.keep_best or run.patience):
        raise ConfigError(
            f"run.{'keep_best' if run.keep_best else 'patience'} goes by the loss on rows that are held out, and none "
            "are; set data.validation_fraction=0.05 or data.validation_path"
        )
    return read

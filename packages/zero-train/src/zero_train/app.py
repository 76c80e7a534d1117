"""The program: from a command line to an exit code.

    console / main     checks the command line, then lets Hydra run one job or a sweep
    _job               one job, which train.run does: check ─> plan ─> assemble ─> loop ─> report

Exit codes: 0; 2 for a configuration that cannot be run; 1 where training failed; 128 + the signal that ended it (130
for Ctrl-C, 143 for SIGTERM). Hydra is used here and in config.py only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from zero_train import config as configuration
from zero_train.errors import ConfigError, RunError

CONFIG_EXIT = 2
FAILED_EXIT = 1
_OWN_FLAGS = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--experimental-rerun"}


def console() -> None:
    """The console script."""
    sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (sys.argv's where None) and returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sweep = bool({"-m", "--multirun"} & set(arguments))
    codes: list[int] = []

    def job(composed: DictConfig) -> None:
        codes.append(_job(composed))
        if codes[-1] > 128:
            raise SystemExit(codes[-1])  # the user wants it to stop: also the rest of a sweep

    saved = sys.argv
    try:
        if not any(word.split("=")[0] in _OWN_FLAGS for word in arguments):
            configuration.check([word for word in arguments if not word.startswith("-")], sweep)
        sys.argv = [saved[0], *arguments]
        hydra_main(config_path=str(configuration.folder()), config_name=configuration.NAME, version_base="1.3")(job)()
    except ConfigError as error:
        _complain(error)
        return CONFIG_EXIT
    except KeyboardInterrupt:
        return 130
    except SystemExit as leaving:  # Hydra's --help and its own refusals, and the job's above
        return leaving.code if isinstance(leaving.code, int) else FAILED_EXIT if leaving.code else 0
    finally:
        sys.argv = saved
    return max(codes, default=0)


def _job(composed: DictConfig) -> int:
    """One job of Hydra's, as an exit code. A failed job of a sweep does not keep the others from running."""
    try:
        config = configuration.to_config(composed)
        if HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN:
            config.run.dir = str(Path(config.run.dir) / str(HydraConfig.get().job.num))
        from zero_train.train import run  # torch and transformers: seconds that a mistyped key need not wait for

        return run(config).exit_code
    except (ConfigError, RunError) as error:
        _complain(error)
        return CONFIG_EXIT if isinstance(error, ConfigError) else FAILED_EXIT


def _complain(error: Exception) -> None:
    """One line on stderr. What is wrong with a configuration is the same on every rank, so only the first says it."""
    rank = os.environ.get("RANK", "0")
    if isinstance(error, ConfigError) and rank != "0":
        return
    sys.stderr.write(f"zero-train: {'' if rank == '0' else f'rank {rank}: '}{error}\n")
    sys.stderr.flush()

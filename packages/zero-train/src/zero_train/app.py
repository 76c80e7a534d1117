"""The program: from a command line to an exit code.

    console / main     composes and checks every job of the command line, then runs one after the other
    _job               one job, which train.run does: check ─> plan ─> assemble ─> loop ─> report

Exit codes: 0; 2 for a configuration that cannot be run; 1 where training failed; 128 + the signal that ended it (130
for Ctrl-C, 143 for SIGTERM). Hydra is used here and in config.py only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from zero_train import __version__, uses
from zero_train import config as configuration
from zero_train.errors import ConfigError, RunError
from zero_train.schema import Config

CONFIG_EXIT = 2
FAILED_EXIT = 1
_SWEEP = {"-m", "--multirun"}


def console() -> None:
    """The console script."""
    sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (sys.argv's where None) and returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    flags, words = {word for word in arguments if word.startswith("-")}, [w for w in arguments if w[0:1] != "-"]
    try:
        if "--version" in flags:
            sys.stdout.write(f"zero-train {__version__}\n")
            return 0
        if flags <= _SWEEP and not any(word.startswith("hydra") for word in words):
            return _all(configuration.jobs(words, bool(flags)), bool(flags))
        return _through_hydra(arguments)
    except ConfigError as error:
        _complain(error)
        return CONFIG_EXIT
    except KeyboardInterrupt:
        return 130


def _all(jobs: Sequence[tuple[Sequence[str], Config]], sweep: bool) -> int:
    """Runs one job after the other, those of a sweep in a folder each. Returns the worst exit code."""
    worst = 0
    for number, (words, config) in enumerate(jobs):
        if sweep:
            config.run.dir = str(Path(config.run.dir) / str(number))
            if os.environ.get("RANK", "0") == "0":
                sys.stdout.write(f"--- job {number + 1} of {len(jobs)}, {config.run.dir}: {' '.join(words)}\n")
                sys.stdout.flush()
        code = _guarded(partial(_job, config))
        worst = max(worst, code)
        if code > 128 or (code == FAILED_EXIT and os.environ.get("WORLD_SIZE", "1") != "1"):
            break  # the user wants it to stop; or this rank failed, and the others may still be in the same job
    return worst


def _through_hydra(arguments: Sequence[str]) -> int:
    """What needs Hydra itself: --help and its other flags, and configuration folders of the user's own."""
    codes: list[int] = []

    def job(composed: DictConfig) -> None:
        codes.append(_guarded(lambda: _of_hydra(composed)))
        if codes[-1] > 128:
            raise SystemExit(codes[-1])

    words = [word for word in arguments if word[0:1] != "-" and "=" in word]
    saved = sys.argv
    sys.argv = [saved[0], *arguments, *configuration.completed(words)[len(words) :]]
    try:
        hydra_main(config_path=str(configuration.folder()), config_name=configuration.NAME, version_base="1.3")(job)()
    except SystemExit as leaving:  # Hydra's --help and its own refusals, and the job's above
        return leaving.code if isinstance(leaving.code, int) else FAILED_EXIT if leaving.code else 0
    finally:
        sys.argv = saved
    return max(codes, default=0)


def _of_hydra(composed: DictConfig) -> int:
    """One job that Hydra composed."""
    hydra = HydraConfig.get()
    config = configuration.to_config(composed)
    if hydra.mode == RunMode.MULTIRUN:
        config.run.dir = str(Path(config.run.dir) / str(hydra.job.num))
    else:
        uses.check(configuration.keys_of(hydra.overrides.task), [config])
    return _job(config)


def _job(config: Config) -> int:
    """One job, as an exit code."""
    from zero_train.train import run  # torch and transformers: seconds that a mistyped key need not wait for

    return run(config).exit_code


def _guarded(job: Callable[[], int]) -> int:
    """What `job` returns, or its refusal as an exit code: it does not keep the other jobs of a sweep from running."""
    try:
        return job()
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

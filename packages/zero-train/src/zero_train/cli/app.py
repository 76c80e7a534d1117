"""Runs the program: hands a command line to Hydra, and turns the outcome of its jobs into an exit code.

    main     reads the command line, checks every job before any of them runs, and lets Hydra run them
    _run     runs one job with train.run: check ─> plan ─> assemble ─> loop ─> report

Exit codes: 0 for success, 2 for a configuration that cannot be run, 1 for failed training, and 128 + the number of the
signal that ended the run (130 for Ctrl-C, 143 for SIGTERM). Only this module, settings/compose.py and sweep.py use
Hydra.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from hydra import main as hydra_main
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from zero_train import __version__
from zero_train.cli import generate, sweep, unused_keys
from zero_train.data import row_sets
from zero_train.errors import ConfigError, RunError
from zero_train.model import folders
from zero_train.schema import Config
from zero_train.settings import checks
from zero_train.settings import compose as configuration

CONFIG_EXIT = sweep.REFUSED
FAILED_EXIT = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (default: sys.argv) and returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--version" in arguments:
        sys.stdout.write(f"zero-train {__version__}\n")
        return 0
    if arguments[:1] == ["generate"]:
        return _guarded(lambda: generate.run(arguments[1:]))
    return _guarded(lambda: _through_hydra(arguments))


def _through_hydra(arguments: Sequence[str]) -> int:
    """Lets Hydra compose and run the jobs of a command line. Returns their highest exit code.

    Raises:
        ConfigError: a flag, a word or a key is wrong. No job has begun.
    """
    words, flags = _parted(arguments)
    given, here = configuration.keys_of(words), os.getpid()
    jobs = sweep.Jobs(given)
    codes = jobs.codes

    def task(composed: DictConfig) -> sweep.Ended:
        hydra = HydraConfig.get()
        number = hydra.job.num if hydra.mode == RunMode.MULTIRUN else None
        ended = _run(composed, number, given)
        codes[number or 0] = code = ended.code
        if os.getpid() == here and (code > 128 or (code == FAILED_EXIT and os.environ.get("WORLD_SIZE", "1") != "1")):
            raise SystemExit(code)  # the user interrupted; or this rank failed while the others may still be in the job
        return ended

    saved = sys.argv
    sys.argv = [saved[0], *words, *flags]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here; Hydra would print its own text and end the process
    try:
        with jobs.watched():
            hydra_main(str(configuration.folder()), configuration.NAME, version_base="1.3")(task)()
    except SystemExit as leaving:  # Hydra's, and the task's above
        return leaving.code if isinstance(leaving.code, int) else FAILED_EXIT if leaving.code else 0
    except KeyboardInterrupt:
        _print("interrupted")
        return 130
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if isinstance(error, ConfigError) or not all(codes.values()):
            raise
        if not codes:
            raise configuration.explained(error) from error
    finally:
        sys.argv = saved
        if table := jobs.table():
            _print(table)
    return max(codes.values(), default=0)


def _parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of a command line, and Hydra's flags with their values, wherever they stand."""
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign, assignment]
    read = parser.parse_intermixed_args(arguments)
    flags = [argument for argument in arguments if argument not in read.overrides]
    return read.overrides, [*flags, *(["--resolve"] if read.cfg == "job" and not read.resolve else [])]


def _refuse(text: str) -> NoReturn:
    raise ConfigError(text)


def _print(text: str) -> None:
    """Prints on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _run(composed: DictConfig, number: int | None, given: Collection[str]) -> sweep.Ended:
    """Runs one job, and reports its error.

    number: its number in a sweep, which names its folder. given: the keys on the command line.
    """
    losses: list[float] = []

    def run() -> int:
        config = configuration.to_config(composed)
        if number is None:
            unused_keys.check(given, [config])
        else:
            config.run.dir = str(Path(config.run.dir) / str(number))
        check(config)
        name = "run.train" if config.task.kind == "pretrain" else "tune.finetune"
        module = import_module(f"zero_train.{name}")  # torch takes seconds, which a mistyped key should not cost
        outcome = module.run(config)
        losses.extend(outcome.losses[-1:])
        return int(outcome.exit_code)

    try:
        code = _guarded(run, "" if number is None else f"job #{number}: ")
    except Exception:
        traceback.print_exc()
        code = FAILED_EXIT
    ended = sweep.Ended(losses[0] if losses and not code else "nan")
    ended.code = code
    return ended


def check(config: Config) -> None:
    """Checks values, packages, the folder of the model and the rows, before torch is imported, which takes seconds.

    Rows are converted here, and later found in the cache of `datasets`.

    Raises:
        ConfigError: for the first mistake.
    """
    checks.values(config)
    if config.task.kind == "pretrain" or config.run.probe:
        return
    path = folders.local(config.model.path)
    if config.task.kind != "reward" and folders.scores(path):
        raise ConfigError(
            f"model.path={path} is a reward model, which scores texts and has no head that writes them; name the model "
            "that it was trained from, or set task=reward"
        )
    row_sets.learned(config)


def _guarded(job: Callable[[], int], name: str = "") -> int:
    """Returns what `job` returns, or reports its error in one line and returns an exit code: a sweep continues.

    name: the first words of the report of an error.
    """
    try:
        return job()
    except (ConfigError, RunError) as error:
        rank, refused = os.environ.get("RANK", "0"), isinstance(error, ConfigError)
        if not refused or os.environ.get("LOCAL_RANK", rank) == "0":  # all ranks of a machine refuse alike
            sys.stderr.write(f"zero-train: {'' if rank == '0' else f'rank {rank}: '}{name}{error}\n")
            sys.stderr.flush()
        return CONFIG_EXIT if refused else FAILED_EXIT

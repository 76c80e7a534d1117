"""Runs the program: takes a command line and returns an exit code.

    main               composes and checks every job of the command line, then runs one after the other
    _job               runs one job with train.run: check ─> plan ─> assemble ─> loop ─> report

Exit codes: 0 for success, 2 for a configuration that cannot be run, 1 for failed training, and 128 + the number of the
signal that ended the run (130 for Ctrl-C, 143 for SIGTERM). Only this module and config.py use Hydra.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zero_train import __version__, deepspeed, early, explain, generate, sweep, unused_keys
from zero_train import config as configuration
from zero_train.errors import ConfigError, RunError, chain
from zero_train.schema import Config

CONFIG_EXIT = sweep.REFUSED
FAILED_EXIT = 1
_SWEEP = {"-m", "--multirun"}
_HELP = {"-h", "--help"}
_TAKES = {"-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir"}
_TAKES |= {"-i", "--info", "--experimental-rerun"}
_INFOS = {"all", "config", "defaults", "defaults-tree", "plugins", "searchpath"}  # --info goes without one, too


class JobFailed(CompactHydraException):
    """A job of a sweep failed in a process that a launcher of Hydra's started. Hydra brings this error back."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code

    def __str__(self) -> str:
        return f"zero-train: the job ended with exit code {self.code}; its own log says why"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (default: sys.argv) and returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    flags, words = {word for word in arguments if word.startswith("-")}, [w for w in arguments if w[0:1] != "-"]
    if "--version" in flags:
        sys.stdout.write(f"zero-train {__version__}\n")
        return 0
    if arguments[:1] == ["generate"]:
        return _guarded(lambda: generate.run(arguments[1:]))
    if arguments and re.fullmatch(r"\w+", arguments[0]) and not flags & _HELP:
        _complain(configuration.unknown_command(arguments[0]))
        return CONFIG_EXIT
    if flags & _HELP and flags <= _HELP | _SWEEP:
        return _guarded(lambda: _help(words))
    if flags <= _SWEEP and not any(word.startswith("hydra") for word in words):
        return _guarded(lambda: _from_words(words, bool(flags)))
    return _guarded(lambda: _through_hydra(*_parted(arguments)))


def _help(words: Sequence[str]) -> int:
    names = [word for word in words if "=" not in word]
    _print(explain.text(names, [word for word in words if "=" in word]))
    return 0


def _from_words(words: Sequence[str], sweep: bool) -> int:
    words, defaults = _with_file(words)
    return _all(configuration.jobs(words, sweep, defaults), sweep)


def _with_file(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words without deepspeed=FILE, and the words that the file stands for, after printing its table."""
    words, path = deepspeed.split(words)
    if path is None:
        return words, []
    try:
        defaults, table = deepspeed.read(path, configuration.keys_of([w for w in words if w[0:1] != "-"]))
    except deepspeed.Refused as error:
        _print(error.table)
        raise
    _print(table)
    return words, defaults


def _print(text: str) -> None:
    """Prints on the first rank."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _all(jobs: Sequence[tuple[Sequence[str], Config]], swept: bool) -> int:
    """Runs the jobs one after the other, each job of a sweep in its own folder. Returns the highest exit code."""
    worst, ended = 0, []
    for number, (words, config) in enumerate(jobs):
        if swept:
            config.run.dir = str(Path(config.run.dir) / str(number))
            _print(f"--- job {number + 1} of {len(jobs)}, {config.run.dir}: {' '.join(words)}")
        code = _guarded(partial(_job, config), f"job {number + 1} of {len(jobs)}: " if swept else "")
        worst = max(worst, code)
        ended.append(sweep.Job(Path(config.run.dir), words, code))
        if code > 128 or (code == FAILED_EXIT and os.environ.get("WORLD_SIZE", "1") != "1"):
            break  # the user interrupted; or this rank failed while the others may still be in the job
    if swept:
        _tell(ended)
    return worst


def _tell(jobs: Sequence[sweep.Job]) -> None:
    """Prints what came of a sweep and writes it down, on the first rank."""
    if jobs and os.environ.get("RANK", "0") == "0" and not all(job.code == CONFIG_EXIT for job in jobs):
        _print(sweep.write(jobs))


def _parted(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words of a command line, and Hydra's flags with their values, wherever they stand."""
    words: list[str] = []
    flags: list[str] = []
    before = ""
    for argument in [part for one in arguments for part in (one.split("=", 1) if one[:2] == "--" else [one])]:
        info = before in ("-i", "--info")
        taken = argument in _INFOS if info else before in _TAKES
        (flags if taken or argument[:1] == "-" else words).append(argument)
        before = "" if taken else argument
    return words, flags


def _through_hydra(words: Sequence[str], flags: Sequence[str]) -> int:
    """Hands the command line to Hydra, which its flags and configuration folders need."""
    codes: list[int] = []
    swept: list[sweep.Job] = []
    here = os.getpid()

    def job(composed: DictConfig) -> None:
        hydra = HydraConfig.get()
        begun: list[Config] = []
        many = hydra.mode == RunMode.MULTIRUN
        codes.append(_guarded(lambda: _of_hydra(composed, begun), f"job #{hydra.job.num}: " if many else ""))
        if many:  # a job that does not compose is one of them, too
            folder = Path(begun[0].run.dir if begun else f"{OmegaConf.select(composed, 'run.dir')}/{hydra.job.num}")
            swept.append(sweep.Job(folder, list(hydra.overrides.task), codes[-1]))
        if codes[-1] and os.getpid() != here:  # where a launcher runs it, this list is a copy
            raise JobFailed(codes[-1])
        if codes[-1] > 128:
            raise SystemExit(codes[-1])

    words, defaults = _with_file(words)
    resolved = ["--resolve"] if {"-c", "--cfg"} & set(flags) and "job" in flags and "--resolve" not in flags else []
    saved = sys.argv
    sys.argv = [saved[0], *defaults, *configuration.completed(words), *flags, *resolved]
    try:
        hydra_main(config_path=str(configuration.folder()), config_name=configuration.NAME, version_base="1.3")(job)()
    except JobFailed as failed:  # HYDRA_FULL_ERROR=1
        return failed.code
    except SystemExit as leaving:  # Hydra's own flags and refusals, and the job's above
        if failures := [error.code for error in chain(leaving) if isinstance(error, JobFailed)]:
            return failures[0]
        return leaving.code if isinstance(leaving.code, int) else FAILED_EXIT if leaving.code else 0
    except (HydraException, OmegaConfBaseException) as error:
        raise configuration.explained(error) from error
    except ValueError as error:  # of flags that exclude each other, before any job
        raise ConfigError(str(error)) from error
    finally:
        sys.argv = saved
    _tell(swept)
    return max(codes, default=0)


def _of_hydra(composed: DictConfig, begun: list[Config]) -> int:
    """Runs one job that Hydra composed, and notes its configuration in `begun`."""
    hydra = HydraConfig.get()
    config = configuration.to_config(composed)
    if hydra.mode == RunMode.MULTIRUN:
        config.run.dir = str(Path(config.run.dir) / str(hydra.job.num))
    else:
        unused_keys.check(configuration.keys_of(hydra.overrides.task), [config])
    begun.append(config)
    return _job(config)


def _job(config: Config) -> int:
    """Runs one job and returns its exit code."""
    early.check(config)
    name = "train" if config.task.kind == "pretrain" else "finetune"
    module = import_module(f"zero_train.{name}")  # torch takes seconds, which a mistyped key should not cost
    return int(module.run(config).exit_code)


def _guarded(job: Callable[[], int], name: str = "") -> int:
    """Returns what `job` returns, or reports its error and returns an exit code, so that a sweep can continue.

    name: what the report of an error begins with.
    """
    try:
        return job()
    except (ConfigError, RunError) as error:
        _complain(error, name)
        return CONFIG_EXIT if isinstance(error, ConfigError) else FAILED_EXIT


def _complain(error: Exception, name: str = "") -> None:
    """Prints one line on stderr. A configuration error is the same on every rank, so only the first rank prints it."""
    rank = os.environ.get("RANK", "0")
    if isinstance(error, ConfigError) and rank != "0":
        return
    sys.stderr.write(f"zero-train: {'' if rank == '0' else f'rank {rank}: '}{name}{error}\n")
    sys.stderr.flush()

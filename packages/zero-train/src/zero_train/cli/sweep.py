"""Watches the jobs of a sweep under any launcher of Hydra's, and reports their results in a table.

Every job is composed and checked before the first one begins. The table reads the run folders, as jobs may have run in
other processes. Needs no torch.
"""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from zero_train.cli import unused_keys
from zero_train.errors import ConfigError
from zero_train.report.metrics import records
from zero_train.settings import compose as configuration
from zero_train.settings import extras

FILE = "sweep.csv"
REFUSED = 2  # exit code of a job that was not begun
_COLUMNS = ("job", "overrides", "exit", "steps", "last loss", "best validation", "tokens/s", "peak RSS GB", "device GB")


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    folder: Path
    words: Sequence[str]  # of its command line
    code: int


def table(jobs: Sequence[Job]) -> list[list[str]]:
    """Returns a header and one row a job. Tokens/s are the median over steps. Missing results are empty cells."""
    common = set(jobs[0].words).intersection(*(job.words for job in jobs)) if len(jobs) > 1 else set()
    return [list(_COLUMNS), *(_row(job, [word for word in job.words if word not in common]) for job in jobs)]


def _row(job: Job, words: list[str]) -> list[str]:
    steps, validation = records(job.folder / "metrics.jsonl"), records(job.folder / "validation.jsonl")
    named = [job.folder.name, " ".join(words), str(job.code)]
    if not steps or job.code == REFUSED:  # then they are of an earlier run
        return [*named, *[""] * (len(_COLUMNS) - len(named))]
    losses = [line["loss"] for line in validation if line["step"]]
    gigabytes = (max(line[name] for line in steps) / 1e9 for name in ("peak_rss_bytes", "device_bytes"))
    return [
        *named,
        str(steps[-1]["step"]),
        f"{steps[-1]['loss']:.4f}",
        f"{min(losses):.4f}" if losses else "",
        f"{median(line['tokens_per_second'] for line in steps):,.0f}",
        *(f"{size:.2f}" for size in gigabytes),
    ]


def write(jobs: Sequence[Job]) -> str:
    """Writes sweep.csv above the jobs' folders, if one of them was made. Returns the table as text."""
    rows = table(jobs)
    folder = next((job for job in jobs if job.folder.is_dir()), jobs[0]).folder.parent
    if folder.is_dir():
        with (folder / FILE).open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + (f"\n{folder / FILE}" if folder.is_dir() else "")


class Ended(float):
    """The last loss of a job, which sweepers read, and its exit code. NaN: it has none."""

    code = 0


class Jobs:
    """The jobs that launchers run while they are `watched`, and their exit codes by number."""

    def __init__(self, given: Collection[str]) -> None:
        """given: the keys on the command line."""
        self.codes: dict[int, int] = {}
        self._given, self._begun = given, dict[int, tuple[Path, Sequence[str]]]()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Wraps each launcher that Hydra makes inside the `with` block, so that its jobs are watched."""
        make = Plugins.instantiate_launcher

        def instantiate(plugins: Plugins, **given: Any) -> Launcher:
            return _Watched(self, make(plugins, **given), given["hydra_context"].config_loader, given["config"])

        Plugins.instantiate_launcher = instantiate  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            Plugins.instantiate_launcher = make  # type: ignore[method-assign]

    def check(self, jobs: Sequence[Sequence[str]], composed: Sequence[Any], first: int) -> None:
        """Raises ConfigError if one of the jobs does not compose, or if none of the first ones uses a key."""
        configs = []
        for number, (words, config) in enumerate(zip(jobs, composed, strict=True), first):
            try:
                configs.append(configuration.to_config(OmegaConf.masked_copy(config, [*config.keys() - {"hydra"}])))
            except ConfigError as error:
                raise ConfigError(f"job #{number}: {error}") from error
            self._begun[number] = Path(configs[-1].run.dir) / str(number), words
        if not first:
            unused_keys.check(self._given, configs)

    def table(self) -> str:
        """Writes the table of the jobs that have ended, and returns it as text; "" if none has begun."""
        ended = [Job(*self._begun[number], code) for number, code in self.codes.items() if number in self._begun]
        if os.environ.get("RANK", "0") != "0" or all(job.code == REFUSED for job in ended):
            return ""
        return write(ended)


class _Watched(Launcher):
    """Checks jobs, has a launcher run them, and keeps their exit codes. A signal leaves no process running."""

    def __init__(self, jobs: Jobs, launcher: Launcher, loader: Any, config: Any) -> None:
        self._jobs, self._launcher, self._loader, self._config = jobs, launcher, loader, config

    def setup(self, **_: Any) -> None:
        """The launcher is set up already."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs, and returns their results from the launcher."""
        composed = [self._loader.load_sweep_config(self._config, list(words)) for words in job_overrides]
        self._jobs.check(job_overrides, composed, initial_job_idx)
        with nullcontext() if isinstance(self._launcher, BasicLauncher) else _ended():
            returned = self._launcher.launch(job_overrides, initial_job_idx)
        for number, job in enumerate(returned, initial_job_idx):
            self._jobs.codes[number] = job.return_value.code
        return returned


@contextmanager
def _ended(seconds: float = 30.0) -> Iterator[None]:
    """Makes Ctrl-C and SIGTERM end the processes started inside, by a kill if need be, and then the program."""
    psutil = extras.loaded("psutil")
    others = set(psutil.Process().children(recursive=True))

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    def started() -> set[Any]:  # multiprocessing's tracker ends by itself
        found = psutil.process_iter(["cmdline"])
        trackers = {each for each in found if "resource_tracker" in " ".join(each.info["cmdline"] or ())}
        return set(psutil.Process().children(recursive=True)) - trackers - others

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit:
        while left := started():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
            for process in psutil.wait_procs(left, seconds)[1]:
                process.kill()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""The table at the end of a sweep: what each job had that others had not, and what came of it.

Reads the run folders, as jobs may have run in other processes. Needs no torch.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from zero_train.run_folder import records

__all__ = ["FILE", "Job", "table", "write"]

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
    """Returns a header and one row a job. Tokens/s are the median over steps; what a job did not reach is empty."""
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

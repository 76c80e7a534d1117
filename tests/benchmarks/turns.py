"""Variants of a benchmark, each a process that waits for its turn, and what is printed of their turns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .commits import ask
from .intervals import mean_ratio

__all__ = ["Rows", "Worker", "in_turn", "report", "started"]

Worker = subprocess.Popen[str]
Rows = dict[str, list[dict[str, Any]]]  # by variant, what each of its turns printed


def started(variant: str, command: Sequence[str]) -> Worker:
    """A worker that has printed "ready". Ends the program if it does not. command: what `python` is given."""
    worker = subprocess.Popen([sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if worker.stdout is None or worker.stdout.readline().strip() != "ready":
        raise SystemExit(f"{variant} ended before it trained; its error is above")
    return worker


def in_turn(workers: Mapping[str, Worker], pairs: int, after: Callable[[int], None] = lambda pair: None) -> Rows:
    """Each worker has a turn in each pair, in the other order in the next one. after: called behind pair k, from 0."""
    taken: Rows = {variant: [] for variant in workers}
    for pair in range(pairs):
        for variant in list(workers)[:: 1 if pair % 2 else -1]:
            taken[variant].append(ask(workers[variant]))
        after(pair)
    return taken


def report(workers: Mapping[str, Worker], taken: Rows, compared: str = "seconds") -> None:
    """Ends the workers and prints a line of each: medians, and the ratio of `compared` to the first one's, with its
    interval for 4 pairs and more."""
    first = next(iter(taken.values()))
    for variant, rows in taken.items():
        workers[variant].communicate()
        found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        if rows is not first:
            found["ratio"] = mean_ratio(*([row[compared] for row in each] for each in (rows, first)))
        print(json.dumps({"variant": variant, "pairs": len(rows), **found}), flush=True)

"""How long two machines with two ranks each take until a step is finished: from a cold start, and after kill -9.

python -m tests.benchmarks.restarts FOLDER [--pairs 6]

Each pair starts the torchruns of a run of zero-train (tests/machines/storm.py says which), takes the time to the first
step in metrics.jsonl, lets it go on for some steps, ends one rank by SIGKILL, and takes the time until all four ranks
are new ones and a step after the last is there. What is asked for is a restart within 1.3 cold starts and 5 s.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

from tests.machines.storm import RANKS, Run, disks
from tests.machines.two import Machines, missing

STEPS = 5  # before the kill


def pair(folder: Path, number: int) -> tuple[float, float]:
    """Seconds of a cold start, and of a restart; a fresh run."""
    with Machines(folder=folder / f"logs{number}") as machines:
        run = Run(machines, folder, f"run{number}", steps=100_000, restarts=3, preloaded=False, timeout=60)
        began = time.monotonic()
        run.begin()
        run.until(run.step, "the first step")
        cold = time.monotonic() - began
        run.until(lambda: run.step() > STEPS, "some steps")
        before = run.ranks()
        began = time.monotonic()
        os.kill(before[number % (2 * RANKS)], signal.SIGKILL)
        run.until(lambda: len(now := run.ranks()) == 2 * RANKS and not {*now.values()} & {*before.values()}, "ranks")
        last = run.step()
        run.until(lambda: run.step() > last, "a step")
        return cold, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.restarts", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=6)
    given = parser.parse_args()
    if reason := missing():
        print(reason)
        return 2
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    taken = []
    with disks(given.folder.absolute()):
        for number in range(given.pairs):
            taken.append(pair(given.folder.absolute(), number))
            cold, again = taken[-1]
            load = os.getloadavg()[0]
            print(
                f"cold {cold:.1f} s, restart {again:.1f} s, load {load:.1f}; allowed {1.3 * cold + 5:.1f}", flush=True
            )
    for name, seconds in zip(("cold start", "restart"), zip(*taken, strict=True), strict=True):
        print(f"{name}: median {statistics.median(seconds):.1f} s ({min(seconds):.1f}-{max(seconds):.1f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())

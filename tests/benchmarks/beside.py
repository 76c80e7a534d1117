"""Seconds of a step of the default run alone, and of two such runs at a time, with OpenMP's long and short waits.

    python -m tests.benchmarks.beside FOLDER [--pairs 8] [--steps 12]

Each pair has three turns, in the other order in the next pair: one run alone with OpenMP's own waits, one alone with
those that `zero-train` sets, and two of the latter at a time. `--long-waits` adds two with OpenMP's own, which take
minutes. Prints a line of JSON each: medians over the pairs, and ratios to the first turn with their 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from .intervals import mean_ratio

OPENMP_OWN = 300_000  # turns of a loop: what GNU OpenMP takes where the environment says nothing


def step_seconds(folder: Path, runs: int, spins: int, steps: int) -> float:
    """The median second of a step over `runs` runs that start together, without the first two steps of each."""
    command = [sys.executable, "-m", "zero_train", f"run.steps={steps}", "run.evaluate_every=0"]
    environment = os.environ | {"GOMP_SPINCOUNT": str(spins)}
    folders = [folder / str(number) for number in range(runs)]
    started = [
        subprocess.Popen([*command, f"run.dir={each}"], env=environment, stdout=subprocess.DEVNULL) for each in folders
    ]
    if any(process.wait() for process in started):
        raise SystemExit("a run failed; its error is above")
    rows = [json.loads(line) for each in folders for line in (each / "metrics.jsonl").read_text().splitlines()]
    for each in folders:
        subprocess.run(["rm", "-r", str(each)], check=True)
    return statistics.median(row["step_seconds"] for row in rows if row.get("step", 0) > 2 and "step_seconds" in row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--long-waits", action="store_true")
    given = parser.parse_args()
    turns = {"alone, OpenMP's waits": (1, OPENMP_OWN), "alone": (1, 10_000), "two at a time": (2, 10_000)}
    if given.long_waits:
        turns["two at a time, OpenMP's waits"] = (2, OPENMP_OWN)
    taken: dict[str, list[float]] = {name: [] for name in turns}
    for pair in range(given.pairs):
        for name in list(turns)[:: 1 if pair % 2 else -1]:
            runs, spins = turns[name]
            taken[name].append(step_seconds(given.folder, runs, spins, given.steps))
    first = next(iter(taken.values()))
    for name, seconds in taken.items():
        found = {"turn": name, "pairs": len(seconds), "seconds": round(statistics.median(seconds), 4)}
        print(json.dumps(found | {"ratio": mean_ratio(seconds, first)}), flush=True)


if __name__ == "__main__":
    main()

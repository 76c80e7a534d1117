"""Runs the zoo, each model in a process of its own, and prints a Markdown table: `python -m tests.zoo [NAME ...]`.

Ends with 1 if a model differs from plain torch, cannot be run or takes too long.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tests.zoo.models import ZOO, Entry

SECONDS = 300  # for a model
ON_NVME = ["mamba", "swin", "spline_flow"]  # these also with parameters, gradients and states in tiers
RESULTS = ("equal", "refused", "differs", "failed")
NEEDS: dict[str, Callable[[Entry], list[str]]] = {
    "beside": lambda entry: entry.beside.split(),
    "packages": lambda entry: [entry.package],
}


def outcome(name: str, placement: str) -> tuple[str, str]:
    """equal, refused, differs or failed, and what was said."""
    command = [sys.executable, "-m", "tests.zoo.one", name, "--placement", placement]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "failed", f"it took more than {SECONDS} s"
    if ran.returncode:
        return "failed", (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
    told = json.loads(ran.stdout.strip().splitlines()[-1])
    return told["result"], told["told"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; without any, all")
    parser.add_argument("--needs", choices=NEEDS, help="print these of the models' needs, and run none")
    parser.add_argument("--table", type=Path, help="write the table here, too")
    given = parser.parse_args()
    chosen = {name: ZOO[name] for name in given.names or ZOO}
    if given.needs:
        print(*sorted({need for entry in chosen.values() for need in NEEDS[given.needs](entry)}))
        return 0
    start, ended = time.monotonic(), []
    for name in chosen:
        for placement in ["", "nvme"] if name in ON_NVME else [""]:
            result, said = outcome(name, placement)
            label = f"{name} all on NVMe" if placement else name
            ended.append((chosen[name].package, label, result, said))
            print(*ended[-1][1:], sep=": ", flush=True)
    table = "\n".join(markdown(ended))
    print(table)
    minutes = (time.monotonic() - start) / 60
    counts = ", ".join(f"{sum(each[2] == result for each in ended)} {result}" for result in RESULTS)
    packages = len({entry.package for entry in chosen.values()})
    print(f"torch {torch.__version__}: {len(chosen)} models of {packages} packages in {minutes:.0f} min: {counts}")
    if given.table:
        given.table.write_text(table + "\n", encoding="utf-8")
    return any(each[2] in ("differs", "failed") for each in ended)


def markdown(ended: list[tuple[str, str, str, str]]) -> list[str]:
    """A row for each package: its version, which of its models are equal, and how the others ended."""
    lines = ["| package | version | equal to plain torch | otherwise |", "|---|---|---|---|"]
    for package in dict.fromkeys(each[0] for each in ended):
        mine = [each[1:] for each in ended if each[0] == package]
        equal = ", ".join(label for label, result, _ in mine if result == "equal")
        others = "; ".join(f"{label}, {result}: {said}" for label, result, said in mine if result != "equal")
        lines.append(f"| {package.replace('==', ' | ')} | {equal} | {others.replace('|', '/')} |".replace("  ", " "))
    return lines


if __name__ == "__main__":
    sys.exit(main())

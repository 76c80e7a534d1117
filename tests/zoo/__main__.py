"""Runs the zoo, each model in a process of its own, and prints a Markdown table: `python -m tests.zoo [NAME ...]`.

Ends with 1 if a model differs from plain torch, cannot be run or takes too long.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from tests.tables import markdown
from tests.zoo.models import ZOO

SECONDS = 300  # for a model
ON_NVME = ["mamba", "swin", "spline_flow"]  # these also with parameters, gradients and states in tiers
RESULTS = ("equal", "refused", "differs", "failed")


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
    parser.add_argument(
        "--needs", choices=["beside", "packages"], help="print these of the models' needs, and run none"
    )
    given = parser.parse_args()
    chosen = {name: ZOO[name] for name in given.names or ZOO}
    if given.needs:
        field = "package" if given.needs == "packages" else "beside"
        print(*sorted({need for entry in chosen.values() for need in getattr(entry, field).split()}))
        return 0
    start, ended = time.monotonic(), []
    for name in chosen:
        for placement in ["", "nvme"] if name in ON_NVME else [""]:
            result, said = outcome(name, placement)
            label = f"{name} all on NVMe" if placement else name
            ended.append((chosen[name].package, label, result, said))
            print(*ended[-1][1:], sep=": ", flush=True)
    print(markdown(("package", "version", "equal to plain torch", "otherwise"), rows(ended)))
    minutes = (time.monotonic() - start) / 60
    counts = ", ".join(f"{sum(each[2] == result for each in ended)} {result}" for result in RESULTS)
    packages = len({entry.package for entry in chosen.values()})
    print(f"torch {torch.__version__}: {len(chosen)} models of {packages} packages in {minutes:.0f} min: {counts}")
    return any(each[2] in ("differs", "failed") for each in ended)


def rows(ended: list[tuple[str, str, str, str]]) -> Iterator[list[str]]:
    """For each package: its version, which of its models are equal, and how the others ended."""
    for package in dict.fromkeys(each[0] for each in ended):
        mine = [each[1:] for each in ended if each[0] == package]
        equal = ", ".join(label for label, result, _ in mine if result == "equal")
        others = "; ".join(f"{label}, {result}: {said}" for label, result, said in mine if result != "equal")
        yield [*package.split("=="), equal, others.replace("|", "/")]


if __name__ == "__main__":
    sys.exit(main())

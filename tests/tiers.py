"""Decides which tests `nox -s tests` runs; all others wait for `nox -s tests-all` or a session of their own.

A test function takes at most a few seconds in `nox -s tests`. One that takes longer keeps as many of its cases as fit,
spread over its parameters, and one whose single case is too long keeps none. `tests/thorough.txt` lists these functions
with the number of cases that they keep. It is written from the times that pytest reported, never by hand:

    pytest tests --junitxml report.xml -o junit_duration_report=call; python -m tests.tiers report.xml --minutes 20

Files that no report has, or of which it skipped all, keep their lines. A test that is not listed runs in full, so a new
one does. Folders and files of `SESSIONS` belong to the session that each of them names.
"""

import argparse
import fnmatch
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("thorough.txt")
GOLDEN = 0.618034  # multiples of the golden ratio keep no step with any parameter
LONGEST_SECONDS = 3.0  # of one case
THOROUGH = "thorough"
SESSIONS = {  # marker: the files that it marks, and the session that runs them
    "followed": "tests/integration/*/test_followed_*.py",
}
MARKERS = {
    THOROUGH: "`nox -s tests` leaves this case out, and `nox -s tests-all` runs it: see tests/tiers.py",
    "advice": "has parts of the advices that the test follows: see tests/advice.py",
    "promise": "names the promises of docs/behaviours.md that the test holds: see scripts/behaviours.py",
    "followed": "does what an error advises: `nox -s followed`",
    "device_full": "the other sessions run a third of these on a simulated device, and `nox -s device` all",
    "machines_full": "the other sessions run those of two machines that take seconds, and `nox -s machines` all",
    "races_expected": "the test has races on a simulated device, which it takes itself",
}


def listed(path: Path = LIST) -> dict[str, int]:
    """Maps "file::function" to the number of its cases that `nox -s tests` runs."""
    lines = [line.split(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines()]
    return {name: int(number) for number, name in lines if number != "#"}


def kept_cases(cases: int, keep: int) -> set[int]:
    """Returns `keep` numbers below `cases`: the first, and others spread over all of them."""
    return set(sorted(range(cases), key=lambda case: case * GOLDEN % 1)[:keep])


def mark(items: Sequence[pytest.Item], thorough: Mapping[str, int]) -> None:
    """Marks each collected case that `nox -s tests` leaves out, and the files of each of `SESSIONS`."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for name, cases in functions.items():
        for marker in _sessions(name):
            for item in cases:
                item.add_marker(marker)
        keep = kept_cases(len(cases), thorough.get(name, len(cases)))
        for number, item in enumerate(cases):
            if number not in keep:
                item.add_marker(THOROUGH)


def _sessions(name: str) -> list[str]:
    return [marker for marker, pattern in SESSIONS.items() if fnmatch.fnmatch(name.partition("::")[0], pattern)]


def durations(reports: Iterable[Path]) -> dict[str, list[float]]:
    """Maps "file::function" to the seconds of each of its cases that ran, from pytest's junit reports."""
    found: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                found[_function(case.get("classname", ""), case.get("name", ""))].append(float(case.get("time", 0)))
    return found


def _function(classname: str, case: str) -> str:
    """The "file::Class::function" of a junit entry, whose class name is that of the module with the classes in it."""
    words = classname.split(".")
    for last in range(len(words), 0, -1):
        if (ROOT / "/".join(words[:last])).with_suffix(".py").is_file():
            return "::".join(["/".join(words[:last]) + ".py", *words[last:], case.partition("[")[0]])
    raise SystemExit(f"{classname}: no such file under {ROOT}; run this in the tree that the report is of")


def chosen(times: Mapping[str, Sequence[float]], seconds: float) -> dict[str, int]:
    """The cases that each function keeps so that all of them take at most `seconds`; without those that keep all."""
    low, high = 0.0, max(map(sum, times.values()))
    for _ in range(40):  # a function's allowance, by halving
        middle = (low + high) / 2
        low, high = (middle, high) if _taken(times, middle) <= seconds else (low, middle)
    kept = {name: _keeps(cases, low) for name, cases in times.items()}
    return {name: keep for name, keep in kept.items() if keep < len(times[name])}


def _keeps(cases: Sequence[float], allowance: float) -> int:
    if sum(cases) <= allowance:
        return len(cases)
    mean = sum(cases) / len(cases)
    return 0 if mean > LONGEST_SECONDS else max(1, int(allowance / mean))


def _taken(times: Mapping[str, Sequence[float]], allowance: float) -> float:
    return sum(sum(cases) * _keeps(cases, allowance) / len(cases) for cases in times.values())


def main(words: Sequence[str]) -> None:
    """Writes the list from reports, so that all functions together take at most so many minutes of a processor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--minutes", type=float, required=True, help="of one processor, over all reports")
    given = parser.parse_args(words)
    times = {name: cases for name, cases in durations(given.reports).items() if not _sessions(name)}
    reported = {name.partition("::")[0] for name in times}
    others = {name: keep for name, keep in listed(LIST).items() if name.partition("::")[0] not in reported}
    kept = chosen(times, given.minutes * 60)
    head = "# Cases that `nox -s tests` keeps of tests that take long. Written by tests/tiers.py; not by hand.\n"
    lines = sorted((kept | others).items())
    LIST.write_text(head + "".join(f"{keep} {name}\n" for name, keep in lines), encoding="utf-8")
    left = sum(sum(times[name]) * (1 - keep / len(times[name])) for name, keep in kept.items())
    total = sum(map(sum, times.values()))
    sys.stdout.write(f"{len(kept)} of {len(times)} functions are listed; {total - left:.0f} of {total:.0f} s stay\n")


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m tests.mutants`: draws mutants, tries them, and writes tests/mutants/table.tsv.

1. `calls`: the tests of `nox -s tests` run once on packages that note which functions each of them calls.
2. `alone`: each mutant is tried with the tests that call its function, of those that call few functions first.
3. `tests`: those that live are put into the packages 50 at a time, and `nox -s tests`' cases run. A test that fails
   is run with each of them alone that it calls; those that it kills leave, until no test fails.
4. `all`: the same with all that still live, and the cases that `nox -s tests-all` has beside those.
5. `table`: the table. Each killer must pass without mutants.

What was tried stands in runs/mutants and the table, and is not tried again: a run that was stopped goes on.
`KEY TEST ...` in place of phases tries one mutant of the table with the tests that you name, and notes what it finds.
`--share 1/2` takes every second mutant or group, so that two processes share phases 2 and 3.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch  # noqa: E402
import transformers  # noqa: E402, F401

from tests.mutants import calls, table  # noqa: E402
from tests.mutants.draw import Mutant, draw  # noqa: E402
from tests.mutants.trial import listed, mutated, trial  # noqa: E402

RUNS = ROOT / "runs" / "mutants"
TESTS = "not thorough and not followed and not machines_full and not device_full"
ALL = "thorough and not followed and not machines_full and not device_full"  # those that TESTS leaves
TWO = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
HERE = ["tests", "--ignore=tests/device", "--ignore-glob=tests/unit/test_*.py"]  # without tests that read sources
ALONE_SECONDS, ALONE_TESTS, TOGETHER, FAILURES = 30.0, 80, 50, 25
NATIVE = {"zero-nvme": "zero_nvme", "zero-optim-cpu": "zero_optim_cpu"}


def tree_of(name: str) -> Path:
    """A copy of the working tree's tracked and new files, with built modules, made once."""
    tree = RUNS / name
    if not tree.exists():
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        for file in filter(None, listed.stdout.decode().split("\n")):
            if (ROOT / file).is_file() or (ROOT / file).is_symlink():  # conf is a link to a folder
                (tree / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / file, tree / file, follow_symlinks=False)
        for package, module in NATIVE.items():
            for built in Path(torch.__file__).parents[1].glob(f"{module}/_native*.so"):
                shutil.copy(built, tree / "packages" / package / "src" / module)
    return tree


def on_sim(tree: Path) -> list[str]:
    return ["tests/device", *(str(path.relative_to(tree)) for path in sorted(tree.glob("tests/*/zero_sim")))]


def count_calls() -> None:
    folder = RUNS / "calls"
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tree = tree_of("marked")
    calls.instrument(tree, folder)
    environment = os.environ | {
        "ZERO_CALLS": str(folder),
        "PYTHONPATH": os.pathsep.join([*map(str, tree.glob("packages/*/src")), str(tree)]),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.calls", *TWO, "-m", TESTS]
    for name, words in (("here", HERE), ("sim", [*on_sim(tree), "--device", "sim"])):
        subprocess.run([*command, *words], cwd=tree, env=environment | {"ZERO_CALLS_RUN": name}, check=False)
    shutil.rmtree(tree)
    (folder / "done").touch()


def found() -> dict[str, tuple[str, str]]:
    """Of each mutant that was tried, by its key: the last phase, and its killer or ""."""
    trials = table.read()
    for file in sorted(RUNS.glob("trials*.jsonl")):
        for line in file.read_text().splitlines():
            tried = json.loads(line)
            if not trials.get(tried["key"], ("", ""))[1]:
                trials[tried["key"]] = tried["phase"], tried["killer"]
    return trials


def note(name: str, mutant: Mutant, phase: str, killer: str) -> None:
    with (RUNS / f"trials{name}.jsonl").open("a") as file:
        file.write(json.dumps({"key": mutant.key, "phase": phase, "killer": killer}) + "\n")
    sys.stdout.write(f"{phase}: {mutant.path}:{mutant.line} {mutant.change[:60]}: {killer or 'lives'}\n")
    sys.stdout.flush()


def callers(mutant: Mutant, names: list[str], tests: dict[str, tuple[float, set[int]]]) -> list[tuple[int, float, str]]:
    """Tests that call the mutant's function, with their numbers of functions and seconds: of few functions first."""
    numbers = {number for number, name in enumerate(names) if name == f"{mutant.path}::{mutant.function}"}
    return sorted((len(called), seconds, test) for test, (seconds, called) in tests.items() if called & numbers)


def chosen_for(mutant: Mutant, names: list[str], tests: dict[str, tuple[float, set[int]]]) -> list[str]:
    """The first of `callers`, of a file not many."""
    if mutant.area == "C++":
        module = NATIVE[mutant.path.split("/")[1]]
        return [f"tests/{kind}/{module}" for kind in ("unit", "conformance", "integration")]
    chosen: list[str] = []
    files: dict[str, int] = {}
    budget = ALONE_SECONDS
    for _, seconds, test in callers(mutant, names, tests):
        file = test.partition("::")[0]
        if files.get(file, 0) < 6 and seconds < budget and len(chosen) < ALONE_TESTS:
            files[file] = files.get(file, 0) + 1
            chosen.append(test)
            budget -= seconds + 0.1
    return chosen


def try_alone(mutants: Sequence[Mutant], share: str) -> None:
    part, of = map(int, share.split("/"))
    tree = tree_of(f"tree{part}")
    names, tests = calls.read(RUNS / "calls")
    for mutant in mutants[part - 1 :: of]:
        if mutant.key in found():
            continue
        chosen = chosen_for(mutant, names, tests)
        sim = [test for test in chosen if test.startswith("tests/device") or "/zero_sim/" in test]
        here = [test for test in chosen if test not in sim]
        killer = ""
        try:
            with mutated(tree, mutant):
                for words, device in ((here, False), (sim, True)):
                    if words and not killer:
                        killer = trial(tree, [*words, "-m", TESTS], 4 * ALONE_SECONDS, device).killer
        except subprocess.CalledProcessError:
            killer = table.INVALID
        note(f"-{part}", mutant, "alone", killer)


def living(mutants: Sequence[Mutant], phases: Sequence[str]) -> list[Mutant]:
    trials = found()
    return [mutant for mutant in mutants if (tried := trials.get(mutant.key)) and not tried[1] and tried[0] in phases]


def try_together(phase: str, group: list[Mutant], marker: str, share: str) -> None:
    """Notes of each mutant of the group a test that fails with it alone, or that it lives.

    A test that passes with all of them is taken to pass with each, and is not run again when those killed have left.
    """
    part, of = map(int, share.split("/"))
    tree, name = tree_of(f"tree{part}"), f"-{part}"
    spread = TWO if of == 1 else ["-n", "1", *TWO[2:]]
    names, tests = calls.read(RUNS / "calls")
    may_kill = {mutant: {test for *_, test in callers(mutant, names, tests)} for mutant in group}
    for words, device in ((HERE, False), (on_sim(tree), True)):
        left = listed(tree, [*words, "-m", marker], device)
        while group and left:
            (tree / "left.txt").write_text("\n".join(left))
            with mutated(tree, *group):
                done = trial(tree, ["@left.txt", *spread, f"--maxfail={FAILURES}"], 7200, device, first=False)
            left = [test for test in left if test not in done.passed]
            failed = done.failed if done.ended else [*done.failed, done.last]
            if not failed and done.passed:
                continue
            killed = []
            for most in (8, len(left)):  # of the tests that fail; all, if of the first none is explained
                for mutant in [] if killed else group:
                    mine = [t for t in failed if mutant.area == "C++" or t in may_kill[mutant] or t not in tests]
                    if not mine:
                        continue
                    with mutated(tree, mutant):
                        killer = trial(tree, mine[:most], 600, device).killer
                    if killer:
                        killed.append(mutant)
                        note(name, mutant, phase, killer)
            group = [mutant for mutant in group if mutant not in killed]
            if not killed:  # no mutant alone fails these
                left = [test for test in left if test not in failed]
                sys.stdout.write(f"fails with no mutant alone: {failed}\n")
                if not done.passed:
                    break
    for mutant in group:
        note(name, mutant, phase, "")


def try_one(mutant: Mutant, tests: list[str]) -> None:
    """Tries the tests in `nox -s tests`' cases first, then in all."""
    tree, device = tree_of("one"), any(test.startswith("tests/device") or "/zero_sim/" in test for test in tests)
    with mutated(tree, mutant):
        phases = (("tests", TESTS), ("all", ALL))
        tried = ((phase, trial(tree, [*tests, "-m", marker], 600, device).killer) for phase, marker in phases)
        phase, killer = next((each for each in tried if each[1]), ("all", ""))
    note("", mutant, phase, killer)


def groups(mutants: list[Mutant], size: int) -> Iterator[list[Mutant]]:
    """Groups of different files as far as possible."""
    number = -(-len(mutants) // size)
    ordered = sorted(mutants, key=lambda mutant: (mutant.path, mutant.line))
    return (ordered[first::number] for first in range(number))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("phases", nargs="*", default=["calls", "alone", "tests", "all", "table"])
    parser.add_argument("--share", default="1/1")
    words = parser.parse_args()
    mutants = draw(ROOT)
    keys = {mutant.key: mutant for mutant in mutants}
    if words.phases[0] in keys:
        try_one(keys[words.phases[0]], words.phases[1:])
        return
    if "calls" in words.phases:
        count_calls()
    if "alone" in words.phases:
        try_alone(mutants, words.share)
    if "tests" in words.phases:
        part, of = map(int, words.share.split("/"))
        for group in [*groups(living(mutants, ["alone"]), TOGETHER)][part - 1 :: of]:
            try_together("tests", group, TESTS, words.share)
    if "all" in words.phases:
        try_together("all", living(mutants, ["tests"]), ALL, "1/1")
    if "table" in words.phases:
        table.write(mutants, found(), tree_of("tree1"))


if __name__ == "__main__":
    main()

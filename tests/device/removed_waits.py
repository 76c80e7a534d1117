"""Removes every wait from the code that orders copies, one after another, and says which test noticed.

    python -m tests.device.removed_waits                     every wait: hours on two cores
    python -m tests.device.removed_waits --list              what would be removed
    python -m tests.device.removed_waits --only device_link/h2d.py   those of one file
    python -m tests.device.removed_waits --json FILE         goes on where FILE ends; `--table FILE` prints it

A wait is found through the syntax tree, in every module of zero_core and zero_offload that has to do with streams: the
module imports `streams`, begins work on the side stream, begins a collective, or handles arrivals. It is a call of
`wait`, `wait_for`, `wait_until`, `follow`, `wait_stream`, `wait_event` or `synchronize`, a thread's `join`, an
arrival's `drop`, or a mark that a copy comes after. Such a call is replaced by its evaluated arguments, such a mark by
nothing. Nothing is skipped: a wait that no test misses is either redundant, and then to be deleted, or the tests lack
something.

The tests run on the simulated accelerator, under its race detector. A removal counts as caught where a test fails that
passes otherwise, and the table says by what: a reported race, other bits, an error, or a hang.
"""

import argparse
import ast
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"zero_core": "zero-core", "zero_offload": "zero-offload"}
WAITS = {"wait", "wait_for", "wait_until", "follow", "wait_stream", "wait_event", "synchronize"}
DROPPED = ("arrival", "uploads")  # whose drop() is a wait: the caller's stream goes on after the copy
AFTER = 3  # the place of `after` in Streams.copy(lane, into, source, after)
TWINS = {"testing", "reference.py"}  # shipped for tests; no run uses them
SECONDS = 600


@dataclass(frozen=True)
class Wait:
    """Characters [start, stop) of a module, which become `instead`."""

    module: str  # "zero_offload/device_link/h2d.py"
    line: int
    text: str
    start: int
    stop: int
    instead: str

    @property
    def name(self) -> str:
        return f"{self.module}:{self.line}: {self.text}"


def has_streams(tree: ast.Module) -> bool:
    """Whether a module has to do with streams."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("streams"):
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("side", "reduce_scatter", "all_gather"):
            return True
        if isinstance(node, ast.Name) and node.id in ("Arrival", "Side", "Mark"):
            return True
        if isinstance(node, ast.ClassDef) and node.name in ("Side", "Arrival"):
            return True
    return False


def waits_of(path: Path, module: str) -> list[Wait]:
    source = path.read_text()
    tree = ast.parse(source)
    if not has_streams(tree):
        return []
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found: list[Wait] = []

    def add(first: ast.expr, last: ast.expr, text: str, instead: str) -> None:
        assert last.end_lineno is not None and last.end_col_offset is not None
        start = lines[first.lineno - 1] + first.col_offset
        stop = lines[last.end_lineno - 1] + last.end_col_offset
        found.append(Wait(module, first.lineno, re.sub(r"\s+", " ", text), start, stop, instead))

    def elements(marks: ast.expr, where: str) -> None:
        """Each mark of what follows `after`, or all of them where the tuple was made elsewhere."""
        if not isinstance(marks, ast.Tuple):
            add(marks, marks, f"{where}: {ast.unparse(marks)}", "()")
            return
        for one in marks.elts:
            others = [ast.unparse(each) for each in marks.elts if each is not one]
            rest = f"({', '.join(others)},)" if others else "()"
            add(marks, marks, f"{where}: {ast.unparse(one)}", rest)

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            joins = node.func.attr == "join" and not node.args
            drops = node.func.attr == "drop" and ast.unparse(node.func.value).endswith(DROPPED)
            if node.func.attr in WAITS or joins or drops:
                kept = [ast.unparse(node.func.value), *map(ast.unparse, node.args)]
                kept += [ast.unparse(keyword.value) for keyword in node.keywords]
                add(node, node, ast.unparse(node), f"([{', '.join(kept)}] and None)")
            after = [keyword.value for keyword in node.keywords if keyword.arg == "after"]
            if node.func.attr == "copy" and (len(node.args) > AFTER or after):
                elements((after or node.args[AFTER:])[0], f"{ast.unparse(node.func)}(...) after")
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "after" for t in node.targets):
            if isinstance(node.value, ast.Tuple):
                elements(node.value, "after =")
    return sorted(found, key=lambda wait: (wait.start, wait.text))


def all_waits() -> list[Wait]:
    found = []
    for package, folder in PACKAGES.items():
        source = ROOT / "packages" / folder / "src"
        for path in sorted((source / package).rglob("*.py")):
            module = path.relative_to(source)
            if module.parts[1] not in TWINS:
                found += waits_of(path, module.as_posix())
    return found


def tests_for(wait: Wait | None, given: list[str]) -> list[str]:
    if given:
        return given
    folders = ["tests/device/zero_offload", "tests/device/zero_core"]
    return folders if wait is None or wait.module.startswith("zero_offload") else folders[::-1]


def run(wait: Wait | None, tests: list[str], seed: int) -> tuple[bool, str, str, float]:
    """(caught, by what, which test, seconds) of the tests without that wait."""
    with tempfile.TemporaryDirectory() as folder:
        path = [str(ROOT), *(str(each) for each in (ROOT / "packages").glob("*/src"))]
        if wait is not None:
            package = wait.module.split("/")[0]
            shutil.copytree(ROOT / "packages" / PACKAGES[package] / "src" / package, Path(folder) / package)
            changed = Path(folder) / wait.module
            source = changed.read_bytes()
            changed.write_bytes(source[: wait.start] + wait.instead.encode() + source[wait.stop :])
            compile(changed.read_bytes(), str(changed), "exec")
            path.insert(0, folder)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "ZERO_SIM_SEED": str(seed)}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--device", "sim"]
        command += ["--timeout", "120", "--timeout-method", "thread", "--tb", "short", *tests_for(wait, tests)]
        began = time.monotonic()
        try:
            ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return True, "hang", "the whole run", time.monotonic() - began
        seconds = time.monotonic() - began
        text = ended.stdout + ended.stderr
        if ended.returncode == 0:
            return False, "", "", seconds
        if ended.returncode in (2, 3, 4, 5):  # pytest itself, not a test
            raise RuntimeError(f"pytest ended with {ended.returncode}: {text[-2000:]}")
        if ended.returncode < 0:
            return True, f"error: the process ended with signal {-ended.returncode}", last_test(text), seconds
        return True, reason(text), last_test(text), seconds


def reason(text: str) -> str:
    """What a failed run shows: reported races, and whatever else failed in the same test."""
    races = bool(re.search(r"\d+ races? (was|were) found", text))
    other = ""
    if "Timeout" in text or "timed out" in text:
        other = "hang"
    elif "torch.equal" in text or "differing(" in text:
        other = "bits"
    elif errors := re.findall(r"^E +(\w*(?:Error|Exception)\b.*)", text, re.M):
        other = "" if races and errors[-1].startswith("RaceError") else f"error: {errors[-1][:80]}"
    elif re.search(r"^E +assert", text, re.M):
        other = "an assertion"
    return " and ".join(filter(None, ("race" if races else "", other))) or "error"


def last_test(text: str) -> str:
    named = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.M)
    return named[0].removeprefix("tests/device/") if named else ""


def table(rows: list[dict]) -> str:
    out = ["| wait | caught by | first test that fails |", "|---|---|---|"]
    for row in rows:
        where = f"`{row['module'].split('/', 1)[1]}:{row['line']}` `{row['text']}`"
        out.append(f"| {where} | {row['by'] or '**not caught**'} | {row['test']} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "tests", nargs="*", help="what pytest is given; without them, the device tests of both packages"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="", help="waits whose name contains this")
    parser.add_argument("--json", type=Path, help="results, added to; what it has already is not run again")
    parser.add_argument("--table", type=Path, help="print the table of such a file and end")
    parser.add_argument("--passed", action="store_true", help="these tests were seen to pass with every wait in place")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the simulated delays")
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    waits = [wait for wait in all_waits() if options.only in wait.name]
    if options.list:
        print("\n".join(wait.name for wait in waits), f"{len(waits)} waits", sep="\n")
        return
    rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    done = {(row["module"], row["text"], row["start"]) for row in rows}
    if not options.passed:
        caught, *_, seconds = run(None, options.tests, options.seed)
        if caught:
            raise SystemExit("the tests fail already with every wait in its place")
        print(f"with every wait in its place the tests pass, in {seconds:.0f} s", flush=True)
    waiting = [wait for wait in waits if (wait.module, wait.text, wait.start) not in done]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(run, wait, options.tests, options.seed): wait for wait in waiting}
        for each in concurrent.futures.as_completed(runs):
            wait, (caught, by, test, seconds) = runs[each], each.result()
            rows.append({**asdict(wait), "by": by, "test": test, "seconds": round(seconds)})
            print(
                f"{'caught' if caught else 'NOT CAUGHT':10s} {by:8s} {seconds:5.0f} s  {wait.name}  {test}", flush=True
            )
            if options.json:
                options.json.write_text(json.dumps(sorted(rows, key=lambda r: (r["module"], r["start"])), indent=1))
    missed = [row for row in rows if not row["by"]]
    print(f"{len(rows) - len(missed)} of {len(rows)} caught")
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

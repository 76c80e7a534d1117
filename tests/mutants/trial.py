"""Runs tests on a tree, in a fork of a process that has imported torch and transformers once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.draw import Mutant

__all__ = ["HUNG", "collected", "listed", "mutated", "trial"]

HUNG = "no end"
LONGEST_SECONDS = 60  # of one test, which takes a few


class _Recorder:
    """Writes each test's name when it starts, and the first that fails, into a file that outlives the process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, **what: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(started=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(failed=report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(ended=nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(failed=report.nodeid)


@dataclass
class Trial:
    """`failed`: tests in their order. `ended`: False if the tests did not end in time, and were killed."""

    failed: list[str]
    passed: set[str]
    last: str
    ended: bool

    @property
    def killer(self) -> str:
        """The first test that failed, or the one that did not end; "" if all passed."""
        return self.failed[0] if self.failed else "" if self.ended else f"{self.last} ({HUNG})"


def trial(tree: Path, tests: Sequence[str], seconds: float, device: bool = False, first: bool = True) -> Trial:
    """Runs these tests on the packages and tests of `tree`; with `first`, until one fails."""
    record, deadline = tree / "trial.jsonl", time.monotonic() + seconds
    record.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        _run(tree, [*tests, *(["-x"] if first else []), *(["--device", "sim"] if device else [])], record)
    ended = _ends(child, deadline)
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    failed = list(dict.fromkeys(line["failed"] for line in lines if "failed" in line))
    last = next((line["started"] for line in reversed(lines) if "started" in line), "import")
    if ended == 4 and not failed:
        raise RuntimeError(f"pytest knows no such tests: {(tree / 'trial.log').read_text()[-2000:]}")
    if ended is not None and ended not in (0, 1, 5) and not failed:  # a crash, or imports that raise
        failed = [f"{last} (ended with {ended})"]
    passed = {line["ended"] for line in lines if "ended" in line} - set(failed)
    return Trial(failed, passed, last, ended is not None)


def collected(tree: Path, tests: Iterable[str]) -> set[str]:
    """Those of the tests that are there."""
    files = {test.partition("::")[0] for test in tests}
    found: set[str] = set()
    for device in (False, True):
        mine = [file for file in files if device == (file.startswith("tests/device") or "/zero_sim/" in file)]
        if mine:
            found.update(listed(tree, sorted(file for file in mine if (tree / file).exists()), device))
    return found & set(tests)


def listed(tree: Path, words: Sequence[str], device: bool) -> list[str]:
    """The names of the tests that pytest collects for these words."""
    trial(tree, ["--collect-only", *words], 600, device, first=False)
    lines = (tree / "trial.log").read_text(errors="replace").splitlines()
    return [line for line in lines if line.startswith("tests/") and "::" in line]


def _ends(child: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            _kill(child)  # what it left
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    _kill(child)
    os.waitpid(child, 0)
    return None


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _run(tree: Path, words: list[str], record: Path) -> None:
    """Does not return."""
    os.setsid()
    output = os.open(tree / "trial.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    os.chdir(tree)
    paths = [str(path) for path in sorted(tree.glob("packages/*/src"))] + [str(tree)]
    here = str(Path(__file__).parents[2])
    sys.path[:] = paths + [path for path in sys.path if path not in ("", here)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests" or name.startswith("zero_")]:
        del sys.modules[name]
    options = ["-q", "-p", "no:cacheprovider", f"--timeout={LONGEST_SECONDS}", f"--rootdir={tree}"]
    code: Any = 70
    try:
        code = int(pytest.main([*options, *words], plugins=[_Recorder(record)]))
    finally:
        os._exit(code)


@contextmanager
def mutated(tree: Path, *mutants: Mutant) -> Iterator[None]:
    """Applies mutants to the tree's files, whose texts and built modules come back at the end.

    Raises subprocess.CalledProcessError if C++ does not compile.
    """
    texts: dict[Path, str] = {}
    built: dict[Path, bytes] = {}
    try:
        for mutant in sorted(mutants, key=lambda each: -each.start):
            path = tree / mutant.path
            text = path.read_text(encoding="utf-8")
            texts.setdefault(path, text)
            path.write_text(mutant.apply(text), encoding="utf-8")
        _forget(texts)
        for package in {mutant.path.split("/")[1] for mutant in mutants if mutant.area == "C++"}:
            (module,) = tree.glob(f"packages/{package}/src/*/_native*.so")
            built[module] = module.read_bytes()
            _build(tree, package, module)
        yield
    finally:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        for module, content in built.items():
            module.unlink()  # a new file: the old one may be mapped
            module.write_bytes(content)
        _forget(texts)


def _build(tree: Path, package: str, module: Path) -> None:
    import pybind11

    folder, options = tree / "build" / package, []
    if not folder.exists():
        options = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        configure = ["cmake", "-S", str(tree / "packages" / package), "-B", str(folder), "-G", "Ninja", *options]
        subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", str(folder)], check=True, capture_output=True)
    (made,) = folder.glob("_native*.so")
    module.unlink()
    shutil.copy(made, module)


def _forget(paths: Iterable[Path]) -> None:
    """Removes bytecode: a file of the same size, written in the same second, would be taken for the one compiled."""
    for path in paths:
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

"""A pytest plugin that notes which functions each test calls, in whatever process or thread.

`instrument` writes a mark into each function of a tree's packages; a call then sets a byte of a file that all processes
of a test share. As `-p tests.mutants.calls` it writes `NAME.json` into the folder `ZERO_CALLS`: for each test its
seconds and the numbers of the functions it called. `functions.json`, of `instrument`, has their names.
"""

import ast
import json
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["instrument"]

FOLDER = "ZERO_CALLS"
MARKS = "ZERO_CALLS_MARKS"
# Begins each module: `_calls_` is the shared file, of this process's worker.
OPENED = """
import mmap as _mmap_, os as _os_
with open(_os_.environ["ZERO_CALLS_MARKS"], "r+b") as _calls_:
    _calls_ = _mmap_.mmap(_calls_.fileno(), 0)
"""


class _Mark(ast.NodeTransformer):
    def __init__(self, path: str, names: list[str]) -> None:
        self._path, self._names, self._within = path, names, ""

    def _inside(self, node: Any) -> Any:
        outer, self._within = self._within, f"{self._within}.{node.name}".lstrip(".")
        self.generic_visit(node)
        if not isinstance(node, ast.ClassDef):
            mark = ast.parse(f"_calls_[{len(self._names)}] = 1").body[0]
            self._names.append(f"{self._path}::{self._within}")
            node.body.insert(int(ast.get_docstring(node) is not None), mark)
        self._within = outer
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _inside


def instrument(tree: Path, folder: Path) -> None:
    """Marks the functions of all modules below `tree`/packages/*/src, in place."""
    names: list[str] = []
    for path in sorted(tree.glob("packages/*/src/**/*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        _Mark(str(path.relative_to(tree)), names).visit(module)
        body, after = module.body, int(ast.get_docstring(module) is not None)
        while after < len(body) and isinstance(body[after], ast.ImportFrom) and body[after].module == "__future__":
            after += 1
        body[after:after] = ast.parse(OPENED).body
        path.write_text(ast.unparse(ast.fix_missing_locations(module)), encoding="utf-8")
    (folder / "functions.json").write_text(json.dumps(names))


class _Plugin:
    def __init__(self, folder: Path, name: str) -> None:
        self._report, path = folder / f"{name}.json", folder / f"{name}.marks"
        path.write_bytes(bytes(len(json.loads((folder / "functions.json").read_text()))))
        os.environ[MARKS] = str(path)
        with path.open("r+b") as opened:
            self._marks = mmap.mmap(opened.fileno(), 0)
        self._tests: dict[str, tuple[float, list[int]]] = {}
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        called = [number for number, mark in enumerate(self._marks[:]) if mark]
        self._marks[:] = bytes(len(self._marks))
        self._tests[nodeid] = round(self._seconds.pop(nodeid, 0.0), 3), called

    def pytest_sessionfinish(self) -> None:
        self._report.write_text(json.dumps(self._tests))


WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
PLUGIN = None  # made before a conftest imports a package
if folder := os.environ.get(FOLDER):
    PLUGIN = _Plugin(Path(folder), f"{os.environ.get('ZERO_CALLS_RUN', '')}{WORKER}")


def pytest_configure(config: pytest.Config) -> None:
    if PLUGIN is not None and (WORKER != "main" or not config.option.numprocesses):  # not the process of the workers
        config.pluginmanager.register(PLUGIN)


def read(folder: Path) -> tuple[list[str], dict[str, tuple[float, set[int]]]]:
    """The names of the functions, and each test's seconds and functions."""
    tests: dict[str, tuple[float, set[int]]] = {}
    reports: Iterable[Path] = (path for path in folder.glob("*.json") if path.name != "functions.json")
    for report in reports:
        for test, (seconds, called) in json.loads(report.read_text()).items():
            tests[test] = seconds, set(called)
    return json.loads((folder / "functions.json").read_text()), tests

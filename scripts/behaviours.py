"""Writes the last column of docs/behaviours.md, the tests that hold each promise: `python scripts/behaviours.py`.

A promise is a row of a table there, whose name and sentence are written by hand. A test says that it holds promises by
`@pytest.mark.promise("name", ...)`, and a file says so of all its tests by `pytestmark`. Files are parsed and not
imported. With `--alone` the script only prints the promises that one test alone holds.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "behaviours.md"
ROW = re.compile(r"^\| `([\w-]+)` \| ([^|]+) \|.*$", re.MULTILINE)


def holders(tests: Path) -> dict[str, Counter[str]]:
    """Maps each promise that a marker below the folder names to its number of tests by file."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.promise(" in text:
            for name in _held(ast.parse(text).body):
                found[name][path.relative_to(tests).as_posix()] += 1
    return found


def _held(body: list[ast.stmt], outside: frozenset[str] = frozenset()) -> Iterator[str]:
    """The promises of each test in the body of a module or class, one after another; a subclass of a suite is one."""
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            outside |= _named([node.value])
        elif isinstance(node, ast.ClassDef):
            marks = outside | _named(node.decorator_list)
            yield from list(_held(node.body, marks)) or (marks if node.name.startswith("Test") else ())
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield from outside | _named(node.decorator_list)


def _named(nodes: Iterable[ast.expr]) -> frozenset[str]:
    calls = (call for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call))
    promises = (call for call in calls if ast.unparse(call.func) == "pytest.mark.promise")
    return frozenset(ast.literal_eval(name) for call in promises for name in call.args)


def made(page: str, found: dict[str, Counter[str]]) -> str:
    """The page with its last column; raises ValueError if promises and markers do not agree."""
    names = [match[1] for match in ROW.finditer(page)]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"two rows of {PAGE.name} have the same name: {twice}")
    if unknown := found.keys() - set(names):
        raise ValueError(f"markers name promises that {PAGE.name} has no row for: {sorted(unknown)}")
    if broken := [name for name in names if name not in found]:
        raise ValueError(f"no test is marked with @pytest.mark.promise of these rows of {PAGE.name}: {broken}")
    return ROW.sub(lambda match: f"| `{match[1]}` | {match[2]} | {_cell(found[match[1]])} |", page)


def _cell(files: Counter[str]) -> str:
    counts = ", ".join(f"{count} in `{file}`" for file, count in sorted(files.items()))
    return counts if len(files) == 1 else f"{files.total()}: {counts}"


def main() -> None:
    found = holders(ROOT / "tests")
    if "--alone" in sys.argv[1:]:
        alone = {name: file for name, files in sorted(found.items()) for file in files if files.total() == 1}
        print("\n".join(f"{name}: {file}" for name, file in alone.items()))
        print(f"{len(alone)} of {len(found)} promises are held by one test alone")
        return
    PAGE.write_text(made(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()

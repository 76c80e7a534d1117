"""docs/behaviours.md names tests that exist, and every table of it names one a line."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "behaviours.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_every_test_that_is_named_exists(path: str) -> None:
    wanted = {name for where, name in NAMED if where == path}
    assert wanted <= functions(ROOT / path), wanted - functions(ROOT / path)
    assert all(name.startswith("test_") for name in wanted)


def test_every_line_of_a_table_names_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and not re.match(r"\|(-+\||.*\| test \|)", line)]
    assert len(rows) > 50
    for row in rows:
        assert re.search(r"`tests/[\w/]+\.py::test_\w+` \|$", row), row

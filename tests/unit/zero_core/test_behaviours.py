"""docs/behaviours.md lists behaviours, and names for each at least one test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "behaviours.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(?:`\s+`)?(\w+)`", TEXT)))
ITEM = re.compile(r"^- (.*\n(?:  .*\n)*)", re.MULTILINE)  # a behaviour, and the indented lines below it
TEST = re.compile(r"^  - `tests/[\w/]+\.py::(?:`\n    `)?test_\w+`$", re.MULTILINE)


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_every_test_that_is_named_exists(path: str) -> None:
    wanted = {name for where, name in NAMED if where == path}
    assert wanted <= functions(ROOT / path), wanted - functions(ROOT / path)
    assert all(name.startswith("test_") for name in wanted)


def test_every_behaviour_names_a_test_on_a_line_of_its_own() -> None:
    listed, not_supported = TEXT.split("\n## Not supported", 1)
    items = ITEM.findall(listed)
    assert len(items) > 50
    for item in items:
        assert TEST.search(item), f"no line `  - `tests/...py::test_...`` below: {item}"
    assert not re.search(r"^\|", TEXT, re.MULTILINE), "a behaviour is a list item here, not the row of a table"

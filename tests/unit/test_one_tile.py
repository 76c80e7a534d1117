"""docs/one_tile.md leads to code: each stop's function has the line that the page shows, and its test exists."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "one_tile.md"
STOPS = dict(re.findall(r"^## (\d)\. (?:.+)\n((?:(?!^## ).*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
NAMED = (ast.ClassDef, ast.FunctionDef)


def named(path: Path, name: str) -> ast.ClassDef | ast.FunctionDef:
    """The class or function of that name, as `Class.method` or `function`."""
    here: Any = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        inside = {each.name: each for each in ast.iter_child_nodes(here) if isinstance(each, NAMED)}
        assert part in inside, f"{path} has no {name}"
        here = inside[part]
    return here


def source_of(path: Path, name: str) -> str:
    """The source of `named` in one line."""
    return " ".join((ast.get_source_segment(path.read_text(encoding="utf-8"), named(path, name)) or "").split())


def test_there_are_eight_stops() -> None:
    assert list(STOPS) == [str(number) for number in range(1, 9)]


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_shows_what_is_there_and_names_its_test(stop: str) -> None:
    text = " ".join(STOPS[stop].split())
    codes = re.findall(r"- Code: \[`([\w.]+)`\]\((\S+)\) (?:does|returns) `(.+?)`\.", text)
    assert len(codes) == text.count("- Code: ") > 0
    for name, link, shown in codes:
        assert shown in source_of((PAGE.parent / link).resolve(), name), f"{name} has no {shown}"
    assert re.search(r"- Rule: .+\. - Test: ", text)
    (test, file) = re.findall(r"- Test: `(test_\w+)` in `(tests/\S+\.py)`$", text)[0]
    source_of(ROOT / file, test)

"""Which tests `nox -s tests` leaves out. Fails if one is left out by mistake, or a line of the list names no test."""

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests import tiers

ROOT = Path(__file__).parents[2]


def marked(*nodeids: str, **listed: int) -> dict[str, list[str]]:
    markers: dict[str, list[str]] = {nodeid: [] for nodeid in nodeids}
    items: Any = [SimpleNamespace(nodeid=nodeid, add_marker=found.append) for nodeid, found in markers.items()]
    tiers.mark(items, {f"tests/unit/test_a.py::{name}": keep for name, keep in listed.items()})
    return markers


def test_every_line_of_the_list_names_a_test() -> None:
    unknown = []
    for name in tiers.listed():
        file, *inside = name.split("::")
        tree = ast.parse((ROOT / file).read_text()) if (ROOT / file).is_file() else ast.Module([], [])
        names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        if inside[0] not in names:  # a class of a conformance suite inherits its functions
            unknown.append(name)
    assert not unknown, "run tests/tiers.py again"


def test_a_listed_function_keeps_so_many_cases_and_others_keep_all() -> None:
    name = "tests/unit/test_a.py"
    found = marked(
        *(f"{name}::test_long[{case}]" for case in range(5)), f"{name}::test_longest", f"{name}::test_new",
        test_long=2, test_longest=0,
    )  # fmt: skip
    assert [bool(found[f"{name}::test_long[{case}]"]) for case in range(5)] == [False, True, False, True, True]
    assert found[f"{name}::test_longest"] == ["thorough"] and found[f"{name}::test_new"] == []


def test_cases_that_are_kept_are_spread_over_both_parameters_of_a_product() -> None:
    cases = [(one, other) for one in range(6) for other in range(4)]
    kept = [cases[number] for number in tiers.kept_cases(len(cases), 8)]
    assert cases[0] in kept and len(kept) == 8
    assert {one for one, _ in kept} == set(range(6)) and {other for _, other in kept} == set(range(4))


def test_files_of_a_session_are_marked() -> None:
    folder = "tests/integration/zero_hf"
    found = marked(f"{folder}/test_followed_advice.py::test_x", f"{folder}/test_grpo.py::test_y")
    assert list(found.values()) == [["followed"], []]

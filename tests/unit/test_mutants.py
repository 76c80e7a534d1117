"""Which changes `nox -s mutants` tries: those of behaviour, the same each time, each in one place."""

import ast
from pathlib import Path

from tests.mutants import draw


def test_at_least_300_mutants_of_all_areas_are_drawn_and_each_is_a_program():
    root = Path(__file__).parents[2]
    mutants = draw.draw(root)
    assert len({mutant.key for mutant in mutants}) == len(mutants) >= 300
    assert {mutant.area for mutant in mutants} == set(draw.AREAS)
    for mutant in mutants:
        text = (root / mutant.path).read_text(encoding="utf-8")
        assert mutant.apply(text) != text
        if mutant.path.endswith(".py"):
            ast.parse(mutant.apply(text))

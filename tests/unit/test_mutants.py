"""Which changes `nox -s mutants` tries: those of behaviour, the same each time, each in one place."""

import ast
from pathlib import Path

from tests.mutants import draw

SOURCE = '''
class Plan:
    limit: int = 3

    def __repr__(self):
        return "plan of %d" % (1 + 2)

    def fits(self, *sizes: "int | None") -> bool:
        """Docstrings with 1 + 2 stay."""
        if len(sizes) > self.limit:
            raise ValueError(f"{1 + 2} sizes")
        self.count = len(sizes)
        note(sizes)
        return True
'''


def test_changes_are_of_behaviour_and_not_of_texts():
    made = [
        (function, SOURCE[start:end].strip(), after.strip()) for function, start, end, after in draw._python(SOURCE)
    ]
    inside = "Plan.fits"
    assert made == [
        (inside, "len(sizes) > self.limit", "(not (len(sizes) > self.limit))"),
        (inside, ">", ">="),
        (inside, 'raise ValueError(f"{1 + 2} sizes")', "pass"),
        (inside, "self.count = len(sizes)", "pass"),
        (inside, "note(sizes)", "pass"),
        (inside, "True", "False"),
    ]


def test_a_line_of_cpp_loses_a_call_or_gets_another_operator():
    source = "  wait(k);\n  if (k < n && done) {  // a < b\n#include <a < b>\n"
    made = [source[:start] + after + source[end:] for _, start, end, after in draw._cpp(source)]
    rest = "\n#include <a < b>\n"
    assert sorted(made) == sorted(
        [
            "  ;\n  if (k < n && done) {  // a < b" + rest,
            "  wait(k);\n  if (k <= n && done) {  // a < b" + rest,
            "  wait(k);\n  if (k < n || done) {  // a < b" + rest,
        ]
    )


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

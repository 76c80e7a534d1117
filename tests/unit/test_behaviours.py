"""docs/behaviours.md names the tests that hold each promise, as `scripts/behaviours.py` finds them."""

import runpy
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "behaviours.py"))
PAGE = "# Page\n\n| name | promise | tests |\n|---|---|---|\n| `a` | It holds | old |\n| `b-2` | So does this | |\n"


def test_the_page_is_up_to_date_and_at_most_900_lines_long():
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    assert page == SCRIPT["made"](page, SCRIPT["holders"](ROOT / "tests")), "run python scripts/behaviours.py"
    assert len(page.splitlines()) <= 900


@pytest.mark.parametrize(
    ("names", "page", "error"),
    [
        ("a", PAGE, r"no test is marked with @pytest.mark.promise of these rows of behaviours.md: \['b-2'\]"),
        (("a", "b-2", "c"), PAGE, r"markers name promises that behaviours.md has no row for: \['c'\]"),
        (("a", "b-2"), PAGE.replace("b-2", "a"), r"two rows of behaviours.md have the same name: \['a'\]"),
    ],
)
def test_a_promise_without_tests_and_a_marker_without_a_promise_are_refused(names, page, error):
    with pytest.raises(ValueError, match=error):
        SCRIPT["made"](page, {name: Counter({"test_x.py": 1}) for name in names})

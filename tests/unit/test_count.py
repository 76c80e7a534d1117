"""`scripts/count.py`: what is a line of code, and which fields are mutable. Fails if a write is overlooked."""

import runpy
from pathlib import Path

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "count.py"))

TEXT = '''"""What it is."""

seen = []
names = {}


class Kept:
    """A docstring
    of two lines."""

    shared: int

    def __init__(self, given):
        self.given = given  # a comment
        self.items = list(given)
        self.last, self.flags = None, {}
        self.store = given

    def take(self, other):
        self.last = self.items.pop()
        self.flags["a"]["b"] = 1
        self.store.update(1)
        other.shared += 1
        names[other] = 1
        seen = other
        return seen
'''


def test_lines_and_fields_are_counted():
    assert SCRIPT["code_lines"](TEXT) == 17
    assert SCRIPT["mutable_fields"]({"zero_core/pool.py": TEXT}) == {
        "zero_core/pool.py:Kept": {"items", "last", "flags", "shared"},
        "zero_core/pool.py:(module)": {"names"},
    }


def test_writes_that_cannot_reach_a_class_are_not_counted():
    """One of a package that imports no sibling, and one into what autograd hands to a function."""
    kept = "class Kept:\n    def __init__(self):\n        self.shared = 0\n"
    writer = "def write(kept):\n    kept.shared = 1\n"

    def counted(**texts):
        return SCRIPT["mutable_fields"]({f"{name}/a.py": text for name, text in texts.items()})

    assert counted(zero_core=kept, zero_offload=writer) == {"zero_core/a.py:Kept": {"shared"}}
    assert counted(zero_core=kept, zero_nvme=writer) == {}
    assert counted(zero_core=kept, zero_offload=writer.replace("kept", "ctx")) == {}
    assert counted(zero_nvme=kept + writer) == {"zero_nvme/a.py:Kept": {"shared"}}

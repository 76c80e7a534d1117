"""Makes a list of the lines of a docstring that explain an argument, as in "nvme: a ByteStore".

Without it Markdown would join these lines into one paragraph.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

LINE = re.compile(r"((\w+)(?:, \w+)*): (?=\S)")


class Arguments(griffe.Extension):
    """Called by griffe for each function and class, after all of its package was read."""

    def on_function(self, *, func: Any, **_: Any) -> None:
        """The arguments of a function."""
        explain(func, {parameter.name for parameter in func.parameters})

    def on_class(self, *, cls: Any, **_: Any) -> None:
        """The arguments of a class, or the fields of a dataclass."""
        explain(cls, set(cls.attributes) | {parameter.name for parameter in cls.parameters})


def explain(documented: Any, names: set[str]) -> None:
    """Rewrites the paragraphs of the docstring that have lines which begin with one of `names` and a colon."""
    if documented.docstring is not None:
        paragraphs = documented.docstring.value.split("\n\n")
        documented.docstring.value = "\n\n".join(listed(paragraph, names) for paragraph in paragraphs)


def listed(paragraph: str, names: set[str]) -> str:
    """The paragraph with such lines as items of a list, which ends where a line begins a new sentence."""
    made: list[str] = []
    inside = False
    for line in paragraph.splitlines():
        found = LINE.match(line)
        begins = found is not None and found[2] in names
        ends = inside and not begins and line[:1] != " " and made[-1].endswith((".", ":"))
        made += [""] if ends or (begins and not inside) else []
        inside = begins or (inside and not ends)
        made.append(f"- {line}" if begins else f"    {line.strip()}" if inside else line)
    return "\n".join(made)

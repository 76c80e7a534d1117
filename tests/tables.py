"""Tables in Markdown, as programs print and write them."""

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A line of cells for each row, below the head."""
    first, *rest = (f"| {' | '.join(map(str, cells))} |".replace("  ", " ") for cells in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *rest])

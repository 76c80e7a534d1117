"""Pages of docs/ whose Python blocks run in order as they stand, and print what stands below them, if anything does."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from zero_core.unit_memory.unit_memory import CAN_SWAP

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {  # page: what it needs besides what all tests have, and the files that it leaves
    "tutorial.md": ((), {"steps.json", "checkpoint", "trained"}),
    "placement.md": ((), set()),
    "lora.md": (("peft", "bitsandbytes"), {"adapter", "run", "base", "out"}),  # nox -s tests-all
}
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+\.?\d*")


@pytest.mark.promise("pages-run")
@pytest.mark.parametrize("page", PAGES)
def test_its_blocks_run_and_print_what_it_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may differ by 3 %, because processors round differently."""
    needs, left = PAGES[page]
    for name in needs:
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python") > 0
    names: dict[str, Any] = {}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if not shown:
            continue
        expected, found = shown.splitlines(), printed.getvalue().splitlines()
        assert [NUMBER.sub("#", line).split() for line in found] == [NUMBER.sub("#", line).split() for line in expected]
        for line, wanted in zip(found, expected, strict=True):
            if "waited" not in line and CAN_SWAP:  # nobody can promise the first; plans without swapping hold more
                values = [float(number) for number in NUMBER.findall(line)]
                assert values == pytest.approx([float(number) for number in NUMBER.findall(wanted)], rel=0.03), line
    assert {path.name for path in tmp_path.iterdir()} == left
